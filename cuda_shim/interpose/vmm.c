/* SPDX-License-Identifier: Apache-2.0 */
/* Virtual memory management: physical memory lives as long as any handle or mapping of it.
 *
 * One object per physical allocation counts its handles, mappings and the arrays it is part of; the charge ends with the last of them, as
 * the memory does. The exporter pays for imported memory, so its object is counted but not charged. Addresses without memory behind them
 * (cuMemAddressReserve) cost nothing. */
#include "interpose/vmm.h"

#include <pthread.h>
#include <stdlib.h>

#include "account/map.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "shim.h"

struct physical {
	uint64_t bytes;
	int device;
	uint64_t references; /* handles, mappings and arrays */
};

/* One allocation that an array holds; each is in the list once. */
struct aq_tile {
	struct physical *physical;
	struct aq_tile *next;
};

/* Handle -> object: owner = struct physical, bytes = how often the handle is held. */
static struct aq_map handles;
/* Array -> the memory that was ever mapped to it: owner = struct aq_tile. */
static struct aq_map sparse_arrays;
/* Start of a mapping -> object: owner = struct physical, 0 for memory that is not counted; bytes = length. */
static struct aq_map mappings;
/* For changes of several entries at once. Never held across a call to the driver (latch.h). */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

void aq_vmm_forget(void)
{
	pthread_mutex_init(&gate, NULL);
	aq_map_forget(&handles);
	aq_map_forget(&mappings);
	aq_map_forget(&sparse_arrays);
}

static struct physical *physical_of(const struct aq_entry *entry)
{
	return (struct physical *)(uintptr_t)entry->owner;
}

/* NULL is memory that is not counted. */
static void drop_reference(struct physical *physical)
{
	if (!physical || --physical->references)
		return;
	aq_uncharge(physical->device, AQ_LINEAR, physical->bytes);
	free(physical);
}

/* One more holder of a handle; `physical` names the object of a handle not seen before. */
static bool hold_handle(CUmemGenericAllocationHandle handle, struct physical *physical)
{
	struct aq_entry entry = { .key = handle, .owner = (uintptr_t)physical };

	if (aq_map_get(&handles, handle, &entry))
		physical = physical_of(&entry);
	entry.bytes++;
	if (!aq_map_put(&handles, &entry))
		return false;
	physical->references++;
	return true;
}

/* One holder of a handle less. Returns its object; the caller drops the reference or holds it again; NULL when the handle is
 * unknown. */
static struct physical *let_go_of_handle(CUmemGenericAllocationHandle handle)
{
	struct aq_entry entry;

	if (!aq_map_take(&handles, handle, &entry))
		return NULL;
	if (--entry.bytes)
		aq_map_put(&handles, &entry);
	return physical_of(&entry);
}

static struct physical *new_physical(int device, uint64_t bytes)
{
	struct physical *physical = calloc(1, sizeof(*physical));

	if (physical)
		*physical = (struct physical){ .device = device, .bytes = bytes };
	return physical;
}

static bool hold_new(CUmemGenericAllocationHandle handle, int device, uint64_t bytes)
{
	struct physical *physical = new_physical(device, bytes);

	if (!physical)
		return false;
	pthread_mutex_lock(&gate);
	bool held = hold_handle(handle, physical);
	pthread_mutex_unlock(&gate);
	if (!held)
		free(physical);
	return held;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
	CUmemGenericAllocationHandle made = 0;
	CUdevice ordinal;

	AQ_LIMITED_OR_RETURN(cuMemCreate(handle, bytes, prop, flags));
	if (!handle || !prop)
		return aq_cuda.cuMemCreate(handle, bytes, prop, flags); /* the driver reports the error */
	CUresult result = aq_place_of_location(&prop->location, prop->type, &ordinal);
	if (result != CUDA_SUCCESS)
		return result;
	if (ordinal == AQ_NO_ORDINAL)
		return aq_cuda.cuMemCreate(handle, bytes, prop, flags);
	int device = aq_device_of(ordinal);
	if (!aq_charge(device, AQ_LINEAR, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = aq_cuda.cuMemCreate(&made, bytes, prop, flags);
	if (result == CUDA_SUCCESS && !hold_new(made, device, bytes)) {
		result = CUDA_ERROR_OUT_OF_MEMORY;
		if (aq_cuda.cuMemRelease(made) != CUDA_SUCCESS)
			return result; /* it stays charged */
	}
	if (result != CUDA_SUCCESS) {
		aq_uncharge(device, AQ_LINEAR, bytes);
		return result;
	}
	*handle = made;
	return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
	AQ_LIMITED_OR_RETURN(cuMemImportFromShareableHandle(handle, os_handle, type));
	if (!handle)
		return aq_cuda.cuMemImportFromShareableHandle(handle, os_handle, type); /* the driver reports the error */
	CUmemGenericAllocationHandle was = *handle;
	CUresult result = aq_cuda.cuMemImportFromShareableHandle(handle, os_handle, type);

	if (result == CUDA_SUCCESS) {
		struct aq_entry known;
		/* Importing what this process exported gives it back its own handle, or another one to the same memory: held, not charged
		 * twice. */
		pthread_mutex_lock(&gate);
		bool held = aq_map_get(&handles, *handle, &known) && hold_handle(*handle, physical_of(&known));
		pthread_mutex_unlock(&gate);
		if (!held && !hold_new(*handle, AQ_NO_DEVICE, 0)) {
			aq_cuda.cuMemRelease(*handle);
			*handle = was;
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	AQ_LIMITED_OR_RETURN(cuMemRelease(handle));
	/* Before the call to the driver: the handle's value may be used again as soon as it is released. */
	pthread_mutex_lock(&gate);
	struct physical *physical = let_go_of_handle(handle);
	pthread_mutex_unlock(&gate);
	CUresult result = aq_cuda.cuMemRelease(handle);
	if (!physical)
		return result;
	pthread_mutex_lock(&gate);
	if (result == CUDA_SUCCESS || hold_handle(handle, physical)) /* held again: with its own reference */
		drop_reference(physical);
	pthread_mutex_unlock(&gate);
	return result;
}

/* The object behind a handle, held for a mapping of it. NULL for memory that is not counted. */
static struct physical *hold_for_mapping(CUmemGenericAllocationHandle handle)
{
	struct aq_entry held;
	struct physical *physical = NULL;

	pthread_mutex_lock(&gate);
	if (aq_map_get(&handles, handle, &held)) {
		physical = physical_of(&held);
		physical->references++;
	}
	pthread_mutex_unlock(&gate);
	return physical;
}

static void drop_mapping(struct physical *physical)
{
	pthread_mutex_lock(&gate);
	drop_reference(physical);
	pthread_mutex_unlock(&gate);
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	AQ_LIMITED_OR_RETURN(cuMemMap(address, bytes, offset, handle, flags));
	struct physical *physical = hold_for_mapping(handle);
	struct aq_entry mapping = { .key = address, .bytes = bytes, .owner = (uintptr_t)physical };
	CUresult result = aq_cuda.cuMemMap(address, bytes, offset, handle, flags);

	/* Of memory that is not counted, too: one call may unmap it with what lies on both its sides. */
	if (result == CUDA_SUCCESS && aq_map_put(&mappings, &mapping))
		return CUDA_SUCCESS;
	if (result == CUDA_SUCCESS) {
		aq_cuda.cuMemUnmap(address, bytes);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	drop_mapping(physical);
	return result;
}

/* How many mappings lie side by side from `address` on; one call may unmap them all. With the gate held. */
static size_t count_mappings(CUdeviceptr address, size_t bytes)
{
	struct aq_entry mapping;
	size_t count = 0;

	for (CUdeviceptr at = address; at - address < bytes && aq_map_get(&mappings, at, &mapping); at += mapping.bytes)
		count++;
	return count;
}

/* Take them out of the map. False when there is no memory to record them; then the map is unchanged. */
static bool take_mappings(CUdeviceptr address, size_t bytes, struct aq_entry **taken, size_t *count)
{
	pthread_mutex_lock(&gate);
	*count = count_mappings(address, bytes);
	*taken = *count ? calloc(*count, sizeof(**taken)) : NULL;
	CUdeviceptr at = address;
	for (size_t i = 0; *taken && i < *count; i++) {
		aq_map_take(&mappings, at, &(*taken)[i]);
		at += (*taken)[i].bytes;
	}
	pthread_mutex_unlock(&gate);
	return !*count || *taken;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	struct aq_entry *taken;
	size_t count;

	AQ_LIMITED_OR_RETURN(cuMemUnmap(address, bytes));
	/* Before the call to the driver: another thread may map memory there as soon as it is free. */
	if (!take_mappings(address, bytes, &taken, &count))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = aq_cuda.cuMemUnmap(address, bytes);
	pthread_mutex_lock(&gate);
	for (size_t i = 0; i < count; i++) {
		if (result == CUDA_SUCCESS)
			drop_reference(physical_of(&taken[i]));
		else
			aq_map_put(&mappings, &taken[i]);
	}
	pthread_mutex_unlock(&gate);
	free(taken);
	return result;
}

struct containing {
	CUdeviceptr address;
	struct physical *physical;
};

/* Looks without removing: records the mapping that holds the address and matches nothing. */
static bool look_inside(const struct aq_entry *mapping, void *context)
{
	struct containing *containing = context;

	if (containing->address - mapping->key < mapping->bytes)
		containing->physical = physical_of(mapping);
	return false;
}

/* The object at an address, held while the driver is called for its handle. NULL: uncounted memory, or no memory. */
static struct physical *hold_what_lies_at(CUdeviceptr address)
{
	struct containing containing = { .address = address };

	pthread_mutex_lock(&gate);
	aq_map_drain(&mappings, look_inside, NULL, &containing);
	if (containing.physical)
		containing.physical->references++;
	pthread_mutex_unlock(&gate);
	return containing.physical;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	AQ_LIMITED_OR_RETURN(cuMemRetainAllocationHandle(handle, address));
	if (!handle)
		return aq_cuda.cuMemRetainAllocationHandle(handle, address); /* the driver reports the error */
	CUmemGenericAllocationHandle was = *handle;
	struct physical *physical = hold_what_lies_at((uintptr_t)address);
	CUresult result = aq_cuda.cuMemRetainAllocationHandle(handle, address);

	if (!physical)
		return result;
	pthread_mutex_lock(&gate);
	bool held = result == CUDA_SUCCESS && hold_handle(*handle, physical);
	drop_reference(physical);
	pthread_mutex_unlock(&gate);
	if (result == CUDA_SUCCESS && !held) {
		aq_cuda.cuMemRelease(*handle);
		*handle = was;
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

/* ---- sparse arrays --------------------------------------------------------------------------------------------- */

static struct aq_tile *tiles_of(uint64_t array)
{
	struct aq_entry entry;

	return aq_map_get(&sparse_arrays, array, &entry) ? (struct aq_tile *)(uintptr_t)entry.owner : NULL;
}

/* The array takes over a reference, and holds the memory from here to its own end: which of its tiles still lie in it is not followed, so
 * an array is charged for what was unmapped from it too, never for less than it has. Without memory to record it, it is held forever. */
static void hold_for_array(uint64_t array, struct physical *physical)
{
	struct aq_tile *first = tiles_of(array);

	for (const struct aq_tile *tile = first; tile; tile = tile->next)
		if (tile->physical == physical) {
			drop_reference(physical);
			return;
		}
	struct aq_tile *tile = malloc(sizeof(*tile));
	if (!tile)
		return;
	*tile = (struct aq_tile){ physical, first };
	struct aq_entry entry = { .key = array, .owner = (uintptr_t)tile };
	if (!aq_map_put(&sparse_arrays, &entry))
		free(tile);
}

struct aq_tile *aq_vmm_array_ending(uint64_t array)
{
	struct aq_entry entry;

	pthread_mutex_lock(&gate);
	bool known = aq_map_take(&sparse_arrays, array, &entry);
	pthread_mutex_unlock(&gate);
	return known ? (struct aq_tile *)(uintptr_t)entry.owner : NULL;
}

void aq_vmm_array_ended(uint64_t array, struct aq_tile *tiles, CUresult result)
{
	struct aq_entry entry = { .key = array, .owner = (uintptr_t)tiles };

	if (!tiles)
		return;
	pthread_mutex_lock(&gate);
	if (result != CUDA_SUCCESS && aq_map_put(&sparse_arrays, &entry))
		tiles = NULL;
	while (tiles) {
		struct aq_tile *next = tiles->next;

		if (result == CUDA_SUCCESS)
			drop_reference(tiles->physical);
		free(tiles);
		tiles = next;
	}
	pthread_mutex_unlock(&gate);
}

/* What a call is about to map into an array, held before the driver maps it: another thread may release the handle meanwhile. */
struct mapped_tile {
	uint64_t array;
	struct physical *physical; /* NULL: nothing, or memory that is not counted */
};

static void hold_tiles(const CUarrayMapInfo *list, unsigned int count, struct mapped_tile *tiles)
{
	struct aq_entry held;

	pthread_mutex_lock(&gate);
	for (unsigned int i = 0; i < count; i++) {
		if (list[i].memOperationType != CU_MEM_OPERATION_TYPE_MAP || !aq_map_get(&handles, list[i].memHandle.memHandle, &held))
			continue;
		tiles[i] = (struct mapped_tile){ (uintptr_t)list[i].resource.array, physical_of(&held) };
		tiles[i].physical->references++;
	}
	pthread_mutex_unlock(&gate);
}

static void settle_tiles(const struct mapped_tile *tiles, unsigned int count, CUresult result)
{
	pthread_mutex_lock(&gate);
	for (unsigned int i = 0; i < count; i++) {
		if (tiles[i].physical && result == CUDA_SUCCESS)
			hold_for_array(tiles[i].array, tiles[i].physical);
		else
			drop_reference(tiles[i].physical);
	}
	pthread_mutex_unlock(&gate);
}

static CUresult map_arrays(CUarrayMapInfo *list, unsigned int count, CUstream stream, bool per_thread)
{
	struct mapped_tile *tiles = list && count ? calloc(count, sizeof(*tiles)) : NULL;

	if (list && count && !tiles)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (tiles)
		hold_tiles(list, count, tiles);
	CUresult result = per_thread ? aq_cuda.cuMemMapArrayAsync_ptsz(list, count, stream)
				     : aq_cuda.cuMemMapArrayAsync(list, count, stream);
	if (tiles)
		settle_tiles(tiles, count, result);
	free(tiles);
	return result;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemMapArrayAsync(list, count, stream));
	return map_arrays(list, count, stream, false);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemMapArrayAsync_ptsz(list, count, stream));
	return map_arrays(list, count, stream, true);
}
