/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_host.c - page-locked host memory: made by the driver, or the application's and registered. Kept in order of address. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

static struct {
	pthread_mutex_t lock;
	struct sim_host_range *ranges;      /* sorted by base, never overlapping */
	size_t count, capacity;
} table = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* Index of the first range that ends behind `address`. */
static size_t position_of(uint64_t address)
{
	size_t low = 0, high = table.count;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (table.ranges[middle].base + table.ranges[middle].bytes <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool overlaps(uint64_t base, uint64_t bytes)
{
	size_t at = position_of(base);
	return at < table.count && table.ranges[at].base < base + bytes;
}

static CUresult insert(struct sim_host_range range)
{
	CUresult result = CUDA_SUCCESS;
	pthread_mutex_lock(&table.lock);
	if (overlaps(range.base, range.bytes)) {
		result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	} else if (table.count == table.capacity) {
		size_t capacity = table.capacity ? table.capacity * 2 : 16;
		struct sim_host_range *ranges = realloc(table.ranges, capacity * sizeof *ranges);
		if (ranges) {
			table.ranges = ranges;
			table.capacity = capacity;
		} else {
			result = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (result == CUDA_SUCCESS) {
		size_t at = position_of(range.base);
		memmove(&table.ranges[at + 1], &table.ranges[at], (table.count - at) * sizeof range);
		table.ranges[at] = range;
		table.count++;
	}
	pthread_mutex_unlock(&table.lock);
	return result;
}

/* Take out the range that begins at `base`, if it is of this kind. */
static bool take_out(uint64_t base, bool registered, struct sim_host_range *out)
{
	pthread_mutex_lock(&table.lock);
	size_t at = position_of(base);
	bool found = at < table.count && table.ranges[at].base == base && table.ranges[at].registered == registered;
	if (found) {
		*out = table.ranges[at];
		memmove(&table.ranges[at], &table.ranges[at + 1], (table.count - at - 1) * sizeof *out);
		table.count--;
	}
	pthread_mutex_unlock(&table.lock);
	return found;
}

bool sim_host_find(const void *address, struct sim_host_range *out)
{
	uint64_t wanted = (uint64_t)(uintptr_t)address;
	pthread_mutex_lock(&table.lock);
	size_t at = position_of(wanted);
	bool found = at < table.count && table.ranges[at].base <= wanted;
	if (found)
		*out = table.ranges[at];
	pthread_mutex_unlock(&table.lock);
	return found;
}

static void unmap(const struct sim_host_range *range)
{
	long page = sysconf(_SC_PAGESIZE);
	munmap((void *)(uintptr_t)range->base, (range->bytes + (uint64_t)page - 1) / (uint64_t)page * (uint64_t)page);
}

void sim_host_free_owned(CUcontext owner)
{
	for (;;) {
		struct sim_host_range range = { 0 };
		pthread_mutex_lock(&table.lock);
		for (size_t i = 0; i < table.count && !range.base; i++)
			if (table.ranges[i].owner == owner)
				range = table.ranges[i];
		pthread_mutex_unlock(&table.lock);
		if (!range.base || !take_out(range.base, range.registered, &range))
			return;
		if (!range.registered)
			unmap(&range);
	}
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && bytes && !(flags & ~(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED)));
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct sim_host_range range = { .base = (uint64_t)(uintptr_t)memory,
					.bytes = bytes,
					.id = sim_next_id(),
					.flags = flags | CU_MEMHOSTALLOC_DEVICEMAP,
					.owner = context };
	CUresult result = insert(range);
	if (result == CUDA_SUCCESS)
		*out = memory;
	else
		unmap(&range);
	return result;
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
	return cuMemHostAlloc(out, bytes, 0);
}

CUresult cuMemFreeHost(void *memory)
{
	CUcontext context;
	struct sim_host_range range;
	SIM_TRY(sim_current(&context));
	if (!memory)
		return CUDA_SUCCESS;
	sim_engine_wait_copies(&context->device->engine);
	SIM_REQUIRE(take_out((uint64_t)(uintptr_t)memory, false, &range));
	unmap(&range);
	return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(memory && bytes);
	SIM_REQUIRE(!(flags & ~(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_IOMEMORY |
				CU_MEMHOSTREGISTER_READ_ONLY)));
	if (flags & CU_MEMHOSTREGISTER_IOMEMORY)
		return CUDA_ERROR_NOT_PERMITTED;
	return insert((struct sim_host_range){ .base = (uint64_t)(uintptr_t)memory,
					       .bytes = bytes,
					       .id = sim_next_id(),
					       .flags = flags | CU_MEMHOSTREGISTER_DEVICEMAP,
					       .registered = true,
					       .owner = context });
}

CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned int flags)
{
	return cuMemHostRegister_v2(memory, bytes, flags);
}

CUresult cuMemHostUnregister(void *memory)
{
	CUcontext context;
	struct sim_host_range range;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(memory);
	sim_engine_wait_copies(&context->device->engine);
	return take_out((uint64_t)(uintptr_t)memory, true, &range) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

/* Unified addressing: the device sees host memory at its own address. */
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_pointer, void *memory, unsigned int flags)
{
	CUcontext context;
	struct sim_host_range range;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(device_pointer && memory && flags == 0 && sim_host_find(memory, &range));
	*device_pointer = (CUdeviceptr)(uintptr_t)memory;
	return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *memory)
{
	CUcontext context;
	struct sim_host_range range;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(flags && memory && sim_host_find(memory, &range));
	*flags = range.flags;
	return CUDA_SUCCESS;
}
