/* Virtual memory management: physical memory lives as long as any handle or mapping of it.
 *
 * One object per physical allocation counts its handles and mappings; the charge goes when both are gone, as the memory does. Imported
 * memory is the exporter's to pay, so its object is charged nothing but still counted. Addresses without memory behind
 * them (cuMemAddressReserve) cost nothing. */
#include <pthread.h>
#include <stdlib.h>

#include "interpose/allocations.h"
#include "interpose/driver.h"
#include "shim.h"

struct physical {
	uint64_t bytes;
	int device;
	uint64_t references; /* handles and mappings */
};

/* Handle -> object: owner = struct physical, bytes = how often the handle is held. */
static struct aq_map handles;
/* Start of a mapping -> object: owner = struct physical, bytes = length. */
static struct aq_map mappings;
/* These calls take the driver microseconds and change several entries at once: one lock, never held across a driver call that may wait. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

void aq_vmm_forget(void)
{
	pthread_mutex_init(&gate, NULL);
	aq_map_forget(&handles);
	aq_map_forget(&mappings);
}

static struct physical *physical_of(const struct aq_entry *entry)
{
	return (struct physical *)(uintptr_t)entry->owner;
}

static void drop_reference(struct physical *physical)
{
	if (--physical->references)
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

static void release_handle(CUmemGenericAllocationHandle handle)
{
	struct aq_entry entry;

	if (!aq_map_take(&handles, handle, &entry))
		return;
	struct physical *physical = physical_of(&entry);
	if (--entry.bytes)
		aq_map_put(&handles, &entry);
	drop_reference(physical);
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

	AQ_LIMITED_OR_RETURN(cuMemCreate(handle, bytes, prop, flags));
	if (!handle || !prop || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return aq_cuda.cuMemCreate(handle, bytes, prop, flags); /* host memory, or the driver says what is wrong */
	int device = aq_device_of(prop->location.id);
	if (!aq_charge(device, AQ_LINEAR, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = aq_cuda.cuMemCreate(&made, bytes, prop, flags);
	if (result == CUDA_SUCCESS && !hold_new(made, device, bytes)) {
		aq_cuda.cuMemRelease(made);
		result = CUDA_ERROR_OUT_OF_MEMORY;
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
	CUresult result = aq_cuda.cuMemImportFromShareableHandle(handle, os_handle, type);

	if (result == CUDA_SUCCESS) {
		struct aq_entry known;
		/* Importing what this process exported gives it back its own handle, or another one to the same memory: held, not charged twice. */
		pthread_mutex_lock(&gate);
		bool held = aq_map_get(&handles, *handle, &known) && hold_handle(*handle, physical_of(&known));
		pthread_mutex_unlock(&gate);
		if (!held && !hold_new(*handle, AQ_NO_DEVICE, 0)) {
			aq_cuda.cuMemRelease(*handle);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	AQ_LIMITED_OR_RETURN(cuMemRelease(handle));
	/* Under the gate: a handle value may be given out again as soon as it is released. */
	pthread_mutex_lock(&gate);
	CUresult result = aq_cuda.cuMemRelease(handle);
	if (result == CUDA_SUCCESS)
		release_handle(handle);
	pthread_mutex_unlock(&gate);
	return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	struct aq_entry held;

	AQ_LIMITED_OR_RETURN(cuMemMap(address, bytes, offset, handle, flags));
	pthread_mutex_lock(&gate);
	CUresult result = aq_cuda.cuMemMap(address, bytes, offset, handle, flags);
	if (result == CUDA_SUCCESS && aq_map_get(&handles, handle, &held)) {
		struct aq_entry mapping = { .key = address, .bytes = bytes, .owner = held.owner };

		if (aq_map_put(&mappings, &mapping)) {
			physical_of(&held)->references++;
		} else {
			aq_cuda.cuMemUnmap(address, bytes);
			result = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	pthread_mutex_unlock(&gate);
	return result;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	struct aq_entry mapping;

	AQ_LIMITED_OR_RETURN(cuMemUnmap(address, bytes));
	pthread_mutex_lock(&gate);
	CUresult result = aq_cuda.cuMemUnmap(address, bytes);
	/* One call may take away several whole mappings that lie side by side. */
	for (CUdeviceptr at = address; result == CUDA_SUCCESS && at < address + bytes && aq_map_take(&mappings, at, &mapping); at += mapping.bytes)
		drop_reference(physical_of(&mapping));
	pthread_mutex_unlock(&gate);
	return result;
}

struct containing {
	CUdeviceptr address;
	struct physical *physical;
};

/* Looks without removing: remembers the mapping that holds the address and matches nothing. */
static bool look_inside(const struct aq_entry *mapping, void *context)
{
	struct containing *containing = context;

	if (containing->address - mapping->key < mapping->bytes)
		containing->physical = physical_of(mapping);
	return false;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	AQ_LIMITED_OR_RETURN(cuMemRetainAllocationHandle(handle, address));
	pthread_mutex_lock(&gate);
	CUresult result = aq_cuda.cuMemRetainAllocationHandle(handle, address);
	if (result == CUDA_SUCCESS) {
		struct containing containing = { .address = (uintptr_t)address };

		aq_map_drain(&mappings, look_inside, NULL, &containing);
		/* Without a mapping of ours the memory is none we count. */
		if (containing.physical && !hold_handle(*handle, containing.physical)) {
			aq_cuda.cuMemRelease(*handle);
			result = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	pthread_mutex_unlock(&gate);
	return result;
}
