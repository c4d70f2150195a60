/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_vmm.c - virtual memory management: address ranges, physical allocations, and the mappings between them.
 *
 * A physical allocation is charged from cuMemCreate until its last handle, mapping, and holder in another process have ended. Its bytes are
 * an extent of one sparse file per device. An exported one moves to a file of its own, and the other process imports that file's
 * descriptor.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

struct sim_map_record {
	struct sim_reservation *reservation;
	uint64_t first, pages, offset;
	struct sim_map_record *next;
};

/* Over all physical allocations and mappings of the process; taken before a memory lock. */
static pthread_mutex_t vmm_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_physical *shared_allocations;

static bool whole_granules(uint64_t bytes)
{
	return bytes && bytes % SIM_GRANULE_BYTES == 0;
}

/* ---- address ranges -------------------------------------------------------------------------------------------------- */

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && whole_granules(bytes) && flags == 0 && (alignment & (alignment - 1)) == 0);
	(void)hint;     /* any address may be returned */
	CUcontext context = sim_thread.current;
	struct sim_device *device = context ? context->device : &sim_cuda.devices[0];
	struct sim_reservation *reservation = sim_reservation_new(device, bytes, alignment);
	if (!reservation)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*out = reservation->base;
	return CUDA_SUCCESS;
}

static bool anything_mapped(const struct sim_reservation *reservation)
{
	for (uint64_t i = 0; i < reservation->bytes / SIM_GRANULE_BYTES; i++)
		if (reservation->mappings[i].physical)
			return true;
	return false;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
	SIM_REQUIRE_READY();
	struct sim_window *window = sim_memory_window_of(address);
	SIM_REQUIRE(window);
	pthread_mutex_lock(&vmm_lock);
	pthread_mutex_lock(window->lock);
	struct sim_reservation *reservation = sim_reservation_at(window, address);
	bool valid = reservation && reservation->base == address && reservation->bytes == bytes && !anything_mapped(reservation);
	if (valid)
		sim_reservation_delete(reservation);
	pthread_mutex_unlock(window->lock);
	pthread_mutex_unlock(&vmm_lock);
	return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- physical allocations -------------------------------------------------------------------------------------------- */

static CUresult check_properties(const CUmemAllocationProp *properties, struct sim_device **device)
{
	CUresult why;
	SIM_REQUIRE(properties && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED);
	*device = sim_device_at(&properties->location, &why);
	if (!*device)
		return why;
	return CUDA_SUCCESS;
}

/* A handle for the fabric needs an IMEX channel, which a simulated node does not have; the granularity has an answer all the same. */
static CUresult check_handle_types(const CUmemAllocationProp *properties)
{
	if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
		return CUDA_ERROR_NOT_PERMITTED;
	return properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option)
{
	struct sim_device *device;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(granularity && (option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
	SIM_TRY(check_properties(properties, &device));
	*granularity = SIM_GRANULE_BYTES;
	return CUDA_SUCCESS;
}

/* An extent of the device's file. The memory lock is held. */
static bool take_extent(struct sim_memory *memory, uint64_t bytes, uint64_t *offset)
{
	if (memory->file < 0)
		memory->file = memfd_create("cuda-sim-memory", MFD_CLOEXEC);
	if (memory->file < 0 || ftruncate(memory->file, (off_t)(memory->file_bytes + bytes)) != 0)
		return false;
	*offset = memory->file_bytes;
	memory->file_bytes += bytes;
	return true;
}

static void drop_extent(const struct sim_memory *memory, uint64_t offset, uint64_t bytes)
{
	fallocate(memory->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)
{
	struct sim_device *device;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(handle && flags == 0);
	SIM_TRY(check_properties(properties, &device));
	SIM_TRY(check_handle_types(properties));
	SIM_REQUIRE(whole_granules(bytes));
	if (atomic_load(&device->shared->lost))
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	struct sim_physical *physical = sim_object_new(SIM_KIND_PHYSICAL, sizeof *physical);
	if (!physical)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&device->memory.lock);
	bool charged = sim_memory_charge(device, bytes) || (sim_pools_release_all(device) && sim_memory_charge(device, bytes));
	bool made = charged && take_extent(&device->memory, bytes, &physical->offset);
	if (charged && !made)
		sim_memory_uncharge(device, bytes);
	pthread_mutex_unlock(&device->memory.lock);
	if (!made) {
		sim_object_delete(physical);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	physical->device = device;
	physical->domain = device->domain;
	physical->properties = *properties;
	physical->properties.location = (CUmemLocation){ CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal };
	physical->bytes = bytes;
	physical->handles = 1;
	physical->fd = -1;
	*handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
	return CUDA_SUCCESS;
}

static void forget_shared(struct sim_physical *physical)
{
	for (struct sim_physical **at = &shared_allocations; *at; at = &(*at)->next_shared)
		if (*at == physical) {
			*at = physical->next_shared;
			return;
		}
}

/* No reference to it is left in this process. vmm_lock is held. */
static void delete_physical(struct sim_physical *physical)
{
	struct sim_device *device = physical->device;
	if (physical->shared.inode) {
		forget_shared(physical);
		sim_shared_leave(sim_cuda.state, atomic_load(&sim_cuda.slot), physical->shared.device, physical->shared.inode);
		close(physical->fd);
	} else {
		pthread_mutex_lock(&device->memory.lock);
		drop_extent(&device->memory, physical->offset, physical->bytes);
		sim_memory_uncharge(device, physical->bytes);
		pthread_mutex_unlock(&device->memory.lock);
	}
	sim_object_delete(physical);
}

static struct sim_physical *physical_of(CUmemGenericAllocationHandle handle)
{
	struct sim_physical *physical = (struct sim_physical *)(uintptr_t)handle;
	return sim_is(physical, SIM_KIND_PHYSICAL) && physical->handles ? physical : NULL;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	SIM_REQUIRE_READY();
	pthread_mutex_lock(&vmm_lock);
	struct sim_physical *physical = physical_of(handle);
	if (physical && --physical->handles == 0 && physical->maps == 0)
		delete_physical(physical);
	pthread_mutex_unlock(&vmm_lock);
	return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(properties);
	pthread_mutex_lock(&vmm_lock);
	struct sim_physical *physical = physical_of(handle);
	if (physical)
		*properties = physical->properties;
	pthread_mutex_unlock(&vmm_lock);
	return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- mapping --------------------------------------------------------------------------------------------------------- */

/* The pages [*first, *last] of the reservation that holds the whole range; vmm_lock and the window's lock are held. */
static struct sim_reservation *pages_of(const struct sim_window *window, CUdeviceptr address, uint64_t bytes, uint64_t *first,
					uint64_t *last)
{
	struct sim_reservation *reservation = sim_reservation_at(window, address);
	if (!reservation || address % SIM_GRANULE_BYTES || bytes > reservation->base + reservation->bytes - address)
		return NULL;
	*first = (address - reservation->base) / SIM_GRANULE_BYTES;
	*last = *first + bytes / SIM_GRANULE_BYTES - 1;
	return reservation;
}

static bool none_mapped(const struct sim_reservation *reservation, uint64_t first, uint64_t last)
{
	for (uint64_t i = first; i <= last; i++)
		if (reservation->mappings[i].physical)
			return false;
	return true;
}

static bool back_pages(const struct sim_physical *physical, const struct sim_reservation *reservation, uint64_t first, uint64_t pages,
		       uint64_t offset)
{
	int fd = physical->fd >= 0 ? physical->fd : physical->device->memory.file;
	uint64_t from = (physical->fd >= 0 ? 0 : physical->offset) + offset;
	return sim_memory_back(reservation->window, reservation->base + first * SIM_GRANULE_BYTES, pages * SIM_GRANULE_BYTES, fd, from);
}

static CUresult map_locked(const struct sim_window *window, CUdeviceptr address, uint64_t bytes, uint64_t offset,
			   struct sim_physical *physical)
{
	uint64_t first, last;
	struct sim_reservation *reservation = pages_of(window, address, bytes, &first, &last);
	SIM_REQUIRE(reservation && none_mapped(reservation, first, last));
	struct sim_map_record *record = malloc(sizeof *record);
	if (!record)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*record = (struct sim_map_record){ reservation, first, last - first + 1, offset, physical->records };
	if (!back_pages(physical, reservation, first, record->pages, offset)) {
		free(record);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	physical->records = record;
	physical->maps++;
	for (uint64_t i = first; i <= last; i++)
		reservation->mappings[i] = (struct sim_mapping){
			.physical = physical, .offset = offset + (i - first) * SIM_GRANULE_BYTES, .first = first, .pages = record->pages
		};
	return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	SIM_REQUIRE_READY();
	struct sim_window *window = sim_memory_window_of(address);
	SIM_REQUIRE(window && whole_granules(bytes) && offset % SIM_GRANULE_BYTES == 0 && flags == 0);
	pthread_mutex_lock(&vmm_lock);
	pthread_mutex_lock(window->lock);
	struct sim_physical *physical = physical_of(handle);
	bool fits = physical && offset <= physical->bytes && bytes <= physical->bytes - offset;
	CUresult result = fits ? map_locked(window, address, bytes, offset, physical) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(window->lock);
	pthread_mutex_unlock(&vmm_lock);
	return result;
}

/* Only whole mappings can be taken away. */
static bool covers_whole_mappings(const struct sim_reservation *reservation, uint64_t first, uint64_t last)
{
	for (uint64_t i = first; i <= last; i++) {
		const struct sim_mapping *mapping = &reservation->mappings[i];
		if (!mapping->physical || mapping->first < first || mapping->first + mapping->pages - 1 > last)
			return false;
	}
	return true;
}

static void forget_record(struct sim_physical *physical, const struct sim_reservation *reservation, uint64_t first)
{
	for (struct sim_map_record **at = &physical->records; *at; at = &(*at)->next)
		if ((*at)->reservation == reservation && (*at)->first == first) {
			struct sim_map_record *record = *at;
			*at = record->next;
			free(record);
			return;
		}
}

/* Removes the mappings and chains the allocations without references to *doomed. */
static void unmap_pages(struct sim_reservation *reservation, uint64_t first, uint64_t last, struct sim_physical **doomed)
{
	for (uint64_t i = first; i <= last;) {
		struct sim_mapping mapping = reservation->mappings[i];
		forget_record(mapping.physical, reservation, mapping.first);
		memset(&reservation->mappings[i], 0, mapping.pages * sizeof mapping);
		if (--mapping.physical->maps == 0 && mapping.physical->handles == 0) {
			if (mapping.physical->shared.inode)
				forget_shared(mapping.physical);
			mapping.physical->next_shared = *doomed;
			*doomed = mapping.physical;
		}
		i += mapping.pages;
	}
	sim_memory_unback(reservation->window, reservation->base + first * SIM_GRANULE_BYTES, (last - first + 1) * SIM_GRANULE_BYTES);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	SIM_REQUIRE_READY();
	uint64_t first, last;
	struct sim_physical *doomed = NULL;
	struct sim_window *window = sim_memory_window_of(address);
	SIM_REQUIRE(window && whole_granules(bytes));
	struct sim_device *device = sim_memory_device_of(address);
	if (device)
		sim_engine_wait_copies(&device->engine);
	pthread_mutex_lock(&vmm_lock);
	pthread_mutex_lock(window->lock);
	struct sim_reservation *reservation = pages_of(window, address, bytes, &first, &last);
	bool valid = reservation && covers_whole_mappings(reservation, first, last);
	if (valid)
		unmap_pages(reservation, first, last, &doomed);
	pthread_mutex_unlock(window->lock);
	while (doomed) {
		struct sim_physical *physical = doomed;
		doomed = physical->next_shared;
		delete_physical(physical);
	}
	pthread_mutex_unlock(&vmm_lock);
	return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(handle);
	CUdeviceptr at = (CUdeviceptr)(uintptr_t)address;
	struct sim_window *window = sim_memory_window_of(at);
	SIM_REQUIRE(window);
	pthread_mutex_lock(&vmm_lock);
	pthread_mutex_lock(window->lock);
	struct sim_reservation *reservation = sim_reservation_at(window, at);
	struct sim_physical *physical = reservation ? reservation->mappings[(at - reservation->base) / SIM_GRANULE_BYTES].physical : NULL;
	if (physical) {
		physical->handles++;
		*handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
	}
	pthread_mutex_unlock(window->lock);
	pthread_mutex_unlock(&vmm_lock);
	return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- access ---------------------------------------------------------------------------------------------------------- */

static bool access_valid(const CUmemAccessDesc *access)
{
	bool known_flags = access->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || access->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
			   access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return known_flags && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE && sim_device_of(access->location.id);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
	SIM_REQUIRE_READY();
	uint64_t first, last;
	struct sim_window *window = sim_memory_window_of(address);
	SIM_REQUIRE(window && whole_granules(bytes) && access && count);
	for (size_t i = 0; i < count; i++)
		SIM_REQUIRE(access_valid(&access[i]));
	pthread_mutex_lock(window->lock);
	struct sim_reservation *reservation = pages_of(window, address, bytes, &first, &last);
	bool valid = reservation != NULL;
	for (uint64_t page = first; valid && page <= last; page++)
		valid = reservation->mappings[page].physical != NULL;
	for (uint64_t page = first; valid && page <= last; page++)
		for (size_t i = 0; i < count; i++)
			reservation->mappings[page].access[access[i].location.id] = access[i].flags;
	pthread_mutex_unlock(window->lock);
	return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
	SIM_REQUIRE_READY();
	struct sim_window *window = sim_memory_window_of(address);
	SIM_REQUIRE(flags && location && window && location->type == CU_MEM_LOCATION_TYPE_DEVICE && sim_device_of(location->id));
	pthread_mutex_lock(window->lock);
	struct sim_reservation *reservation = sim_reservation_at(window, address);
	const struct sim_mapping *mapping = reservation ? &reservation->mappings[(address - reservation->base) / SIM_GRANULE_BYTES] : NULL;
	bool valid = mapping && mapping->physical;
	if (valid)
		*flags = (unsigned long long)mapping->access[location->id];
	pthread_mutex_unlock(window->lock);
	return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- between processes ----------------------------------------------------------------------------------------------- */

/* Copy the parts of an extent that were ever written. */
static bool copy_extent(int from, uint64_t offset, uint64_t bytes, int to)
{
	static char buffer[1 << 16];    /* under vmm_lock */
	off_t at = (off_t)offset, end = (off_t)(offset + bytes);
	while ((at = lseek(from, at, SEEK_DATA)) >= 0 && at < end) {
		ssize_t length = pread(from, buffer, (size_t)(end - at) < sizeof buffer ? (size_t)(end - at) : sizeof buffer, at);
		if (length <= 0 || pwrite(to, buffer, (size_t)length, at - (off_t)offset) != length)
			return false;
		at += length;
	}
	return true;
}

/* Give the allocation its own file, under every mapping it has, and record it in the node. vmm_lock is held. */
static bool make_shareable(struct sim_physical *physical)
{
	struct sim_device *device = physical->device;
	struct stat status;
	int fd = memfd_create("cuda-sim-shared", MFD_CLOEXEC);
	if (fd < 0)
		return false;
	bool ready = ftruncate(fd, (off_t)physical->bytes) == 0 && fstat(fd, &status) == 0 &&
		     copy_extent(device->memory.file, physical->offset, physical->bytes, fd);
	struct sim_shared_file file = { .bytes = physical->bytes };
	pthread_mutex_lock(&device->memory.lock);
	if (ready) {
		file.device = status.st_dev;
		file.inode = status.st_ino;
		ready = sim_shared_enter(sim_cuda.state, atomic_load(&sim_cuda.slot), &physical->domain, &file);
	}
	if (ready) {
		drop_extent(&device->memory, physical->offset, physical->bytes);
		physical->fd = fd;
		physical->shared = (struct sim_backing){ file.device, file.inode };
		for (struct sim_map_record *record = physical->records; record; record = record->next)
			ready &= back_pages(physical, record->reservation, record->first, record->pages, record->offset);
		physical->next_shared = shared_allocations;
		shared_allocations = physical;
	} else {
		close(fd);
	}
	pthread_mutex_unlock(&device->memory.lock);
	return ready;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
				      unsigned long long flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && flags == 0);
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	for (int i = 0; i < sim_cuda.n_devices; i++)
		sim_engine_wait_copies(&sim_cuda.devices[i].engine);    /* their bytes must move along */
	pthread_mutex_lock(&vmm_lock);
	struct sim_physical *physical = physical_of(handle);
	if (physical && physical->properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
		int fd = physical->fd >= 0 || make_shareable(physical) ? fcntl(physical->fd, F_DUPFD_CLOEXEC, 0) : -1;
		result = fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
		if (fd >= 0)
			*(int *)out = fd;
	}
	pthread_mutex_unlock(&vmm_lock);
	return result;
}

static struct sim_physical *already_here(const struct stat *status)
{
	for (struct sim_physical *physical = shared_allocations; physical; physical = physical->next_shared)
		if (physical->shared.inode == status->st_ino && physical->shared.device == status->st_dev)
			return physical;
	return NULL;
}

static CUresult import_new(int fd, const struct stat *status, struct sim_physical **out)
{
	struct sim_domain domain;
	uint64_t bytes;
	if (!sim_claim_slot() ||
	    !sim_shared_join(sim_cuda.state, atomic_load(&sim_cuda.slot), status->st_dev, status->st_ino, &domain, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	struct sim_device *device = sim_device_of_domain(&domain);
	struct sim_physical *physical = device ? sim_object_new(SIM_KIND_PHYSICAL, sizeof *physical) : NULL;
	int own_fd = physical ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
	if (own_fd < 0) {
		if (physical)
			sim_object_delete(physical);
		sim_shared_leave(sim_cuda.state, atomic_load(&sim_cuda.slot), status->st_dev, status->st_ino);
		return device ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_DEVICE;
	}
	physical->device = device;
	physical->domain = domain;
	physical->properties = (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
						      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
						      .location = { CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal } };
	physical->bytes = bytes;
	physical->imported = true;
	physical->fd = own_fd;
	physical->shared = (struct sim_backing){ status->st_dev, status->st_ino };
	physical->next_shared = shared_allocations;
	shared_allocations = physical;
	*out = physical;
	return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
	struct stat status;
	int fd = (int)(intptr_t)os_handle;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(handle);
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	SIM_REQUIRE(fstat(fd, &status) == 0);
	pthread_mutex_lock(&vmm_lock);
	struct sim_physical *physical = already_here(&status);
	CUresult result = physical ? CUDA_SUCCESS : import_new(fd, &status, &physical);
	if (result == CUDA_SUCCESS) {
		physical->handles++;
		*handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
	}
	pthread_mutex_unlock(&vmm_lock);
	return result;
}

/* ---- not supported, by the attributes --------------------------------------------------------------------------------- */

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type, unsigned long long flags)
{
	(void)address, (void)bytes, (void)type, (void)flags;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(handle);
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(handle && properties);
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *properties, CUmulticastGranularity_flags option)
{
	(void)option;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(granularity && properties);
	return CUDA_ERROR_NOT_SUPPORTED;
}
