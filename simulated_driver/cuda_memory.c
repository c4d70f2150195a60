/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_memory.c - linear device memory and managed memory: allocation, queries, advice. The allocator itself is memory.c. */
#include <string.h>
#include <time.h>

#include "simulated_driver/cuda_internal.h"

#define PITCH_BYTES 512u
#define REAP_CHECK_NS 50000000u     /* how long memory of a killed process may still look used to cuMemGetInfo */

/* ---- device memory --------------------------------------------------------------------------------------------------- */

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && bytes);
	SIM_TRY(sim_capture_unsafe_call());
	return sim_memory_allocate(context->device, context, bytes, out);
}

/* Rows start at multiples of 512 bytes, for any element size. */
CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element_bytes)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && pitch && width && height);
	SIM_REQUIRE(element_bytes == 4 || element_bytes == 8 || element_bytes == 16);
	SIM_TRY(sim_capture_unsafe_call());
	size_t row = (width + PITCH_BYTES - 1) / PITCH_BYTES * PITCH_BYTES, total;
	SIM_REQUIRE(row >= width);
	if (__builtin_mul_overflow(row, height, &total))
		return CUDA_ERROR_OUT_OF_MEMORY;
	SIM_TRY(sim_memory_allocate(context->device, context, total, out));
	*pitch = row;
	return CUDA_SUCCESS;
}

/* Queued copies into the memory end first. The real driver often waits for the whole device here; kernels do not matter to the bytes. */
CUresult cuMemFree_v2(CUdeviceptr address)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	if (address == 0)
		return CUDA_SUCCESS;
	SIM_TRY(sim_capture_unsafe_call());
	struct sim_device *device = sim_memory_device_of(address);
	sim_engine_wait_copies(device ? &device->engine : &context->device->engine);
	return sim_memory_free(address);
}

static uint64_t coarse_now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(free_bytes || total_bytes);
	struct sim_device *device = context->device;
	uint64_t now = coarse_now_ns();
	if (sim_unlikely(now >= atomic_load_explicit(&device->next_reap_check_ns, memory_order_relaxed))) {
		atomic_store_explicit(&device->next_reap_check_ns, now + REAP_CHECK_NS, memory_order_relaxed);
		sim_reap(sim_cuda.state);
	}
	uint64_t used = atomic_load_explicit(device->domain.used_bytes, memory_order_relaxed);
	if (total_bytes)
		*total_bytes = device->domain.capacity_bytes;
	if (free_bytes)
		*free_bytes = used < device->domain.capacity_bytes ? device->domain.capacity_bytes - used : 0;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
	CUcontext context;
	struct sim_range range;
	struct sim_host_range host;
	SIM_TRY(sim_current(&context));
	if (sim_memory_find(address, &range) && range.mapped) {
		if (base)
			*base = range.base;
		if (bytes)
			*bytes = range.bytes;
		return CUDA_SUCCESS;
	}
	if (!sim_host_find((const void *)(uintptr_t)address, &host))
		return CUDA_ERROR_NOT_FOUND;
	if (base)
		*base = host.base;
	if (bytes)
		*bytes = host.bytes;
	return CUDA_SUCCESS;
}

/* ---- managed memory -------------------------------------------------------------------------------------------------- */

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && bytes && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
	SIM_TRY(sim_capture_unsafe_call());
	return sim_memory_allocate_managed(context->device, context, bytes, out);
}

static struct sim_large *managed_at(CUdeviceptr address, size_t bytes)
{
	struct sim_range range;
	if (!sim_memory_find(address, &range) || !range.managed || bytes > range.base + range.bytes - address)
		return NULL;
	return range.large;
}

/* Fills and kernels run on the device: managed pages come there by faults, unless the device may use them where they are. */
void sim_managed_touch(CUdeviceptr address, size_t bytes, struct sim_device *device)
{
	struct sim_large *managed = managed_at(address, bytes);
	int ordinal = (int)(device - sim_cuda.devices);
	if (managed && managed->accessed_by != ordinal && (managed->preferred == CU_DEVICE_INVALID || managed->preferred == ordinal))
		sim_memory_move(managed, address, bytes, device);
}

static void touch_all(CUdeviceptr address, struct sim_device *device)
{
	const struct sim_large *managed = managed_at(address, 0);
	if (managed)
		sim_managed_touch(managed->base, managed->bytes, device);
}

void sim_touch(const struct sim_touched *touched, struct sim_device *device)
{
	for (uint32_t i = 0; i < touched->count; i++)
		touch_all(touched->addresses[i], device);
}

void sim_program_touch(const struct sim_program *program)
{
	for (uint32_t i = 0; i < program->n_touches; i++) {
		const struct sim_program_touch *touch = &program->touches[i];
		if (touch->bytes)
			sim_managed_touch(touch->address, touch->bytes, touch->device);
		else
			touch_all(touch->address, touch->device);
	}
}

static bool location_known(int location)
{
	return location == CU_DEVICE_CPU || sim_device_of(location);
}

static CUresult prefetch(CUdeviceptr address, size_t bytes, int location, CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	struct sim_large *managed = managed_at(address, bytes);
	SIM_REQUIRE(managed && bytes);
	if (!location_known(location))
		return CUDA_ERROR_INVALID_DEVICE;
	sim_memory_move(managed, address, bytes, sim_device_of(location));
	managed->prefetched = location;
	/* 25 bytes per ns over PCIe */
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_MARK, .duration_ns = bytes / 25 });
}

static int ordinal_of(CUmemLocation location)
{
	return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : CU_DEVICE_CPU;
}

static bool location_valid(CUmemLocation location)
{
	return (int)location.type >= CU_MEM_LOCATION_TYPE_DEVICE && location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream)
{
	return prefetch(address, bytes, device, stream);
}
CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream)
{
	return prefetch(address, bytes, device, sim_own(stream));
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream)
{
	SIM_REQUIRE(flags == 0 && location_valid(location));
	return prefetch(address, bytes, ordinal_of(location), stream);
}

CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream)
{
	return cuMemPrefetchAsync_v2(address, bytes, location, flags, sim_own(stream));
}

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	struct sim_large *managed = managed_at(address, bytes);
	SIM_REQUIRE(managed && bytes);
	bool names_device = advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION || advice == CU_MEM_ADVISE_SET_ACCESSED_BY;
	if (names_device && !location_known(device))
		return CUDA_ERROR_INVALID_DEVICE;
	switch (advice) {
	case CU_MEM_ADVISE_SET_READ_MOSTLY: managed->read_mostly = 1; break;
	case CU_MEM_ADVISE_UNSET_READ_MOSTLY: managed->read_mostly = 0; break;
	case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: managed->preferred = device; break;
	case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: managed->preferred = CU_DEVICE_INVALID; break;
	case CU_MEM_ADVISE_SET_ACCESSED_BY: managed->accessed_by = device; break;
	case CU_MEM_ADVISE_UNSET_ACCESSED_BY: managed->accessed_by = CU_DEVICE_INVALID; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location)
{
	return cuMemAdvise(address, bytes, advice, location_valid(location) ? ordinal_of(location) : CU_DEVICE_INVALID);
}

static int location_type_of(int location)
{
	if (location == CU_DEVICE_INVALID)
		return CU_MEM_LOCATION_TYPE_INVALID;
	return location == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
}

CUresult cuMemRangeGetAttribute(void *data, size_t data_bytes, CUmem_range_attribute attribute, CUdeviceptr address, size_t bytes)
{
	CUcontext context;
	int value;
	SIM_TRY(sim_current(&context));
	struct sim_large *managed = managed_at(address, bytes);
	SIM_REQUIRE(data && managed && data_bytes >= sizeof value && data_bytes % sizeof value == 0);
	switch (attribute) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: value = managed->read_mostly; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: value = managed->preferred; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: value = managed->preferred; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: value = location_type_of(managed->preferred); break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: value = managed->prefetched; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: value = managed->prefetched; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: value = location_type_of(managed->prefetched); break;
	case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: value = managed->accessed_by; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	int *values = data;
	values[0] = value;
	for (size_t i = 1; i < data_bytes / sizeof value; i++)      /* a list of devices, filled up */
		values[i] = CU_DEVICE_INVALID;
	return CUDA_SUCCESS;
}

CUresult cuMemRangeGetAttributes(void **data, size_t *data_bytes, CUmem_range_attribute *attributes, size_t count, CUdeviceptr address,
				 size_t bytes)
{
	SIM_REQUIRE(data && data_bytes && attributes && count);
	for (size_t i = 0; i < count; i++)
		SIM_TRY(cuMemRangeGetAttribute(data[i], data_bytes[i], attributes[i], address, bytes));
	return CUDA_SUCCESS;
}

static CUresult attach(CUstream handle, CUdeviceptr address, size_t bytes, unsigned flags)
{
	CUstream stream;
	struct sim_host_range host;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST || flags == CU_MEM_ATTACH_SINGLE);
	SIM_REQUIRE(managed_at(address, bytes) || sim_host_find((void *)(uintptr_t)address, &host));
	return CUDA_SUCCESS;
}

CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr address, size_t bytes, unsigned int flags)
{
	return attach(stream, address, bytes, flags);
}
CUresult cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr address, size_t bytes, unsigned int flags)
{
	return attach(sim_own(stream), address, bytes, flags);
}

/* ---- what is known about a pointer ----------------------------------------------------------------------------------- */

/* Of memory that the driver knows, on either side. */
struct pointer_facts {
	bool is_host;
	struct sim_range device;
	struct sim_host_range host;
};

static bool find_pointer(CUdeviceptr address, struct pointer_facts *facts)
{
	memset(facts, 0, sizeof *facts);
	if (sim_memory_find(address, &facts->device))
		return true;
	facts->is_host = sim_host_find((const void *)(uintptr_t)address, &facts->host);
	return facts->is_host;
}

static CUresult host_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address, const struct sim_host_range *host)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = host->owner; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_HOST; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = address; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)data = (void *)(uintptr_t)address; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = host->id; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = host->owner ? host->owner->device->ordinal : 0; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = host->base; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = host->bytes; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = 1; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)data = 0; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)data = CU_MEM_HANDLE_TYPE_NONE; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(int *)data = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)data = NULL; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult device_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address, const struct sim_range *range)
{
	bool plain = range->kind != SIM_RANGE_RESERVATION && !range->pool && !range->managed && !range->imported;
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = range->owner;
		return range->owner ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;      /* pools and VMM memory belong to no context */
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_DEVICE; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = address; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		*(void **)data = range->managed ? (void *)(uintptr_t)address : NULL;
		return range->managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)data = range->id; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)data = range->managed; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = range->device->ordinal; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)data = plain; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(int *)data = 0; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = range->reserved_base ? range->reserved_base : range->base;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = range->reserved_base ? range->reserved_bytes : range->bytes;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = range->base; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = range->bytes; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = range->mapped; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(unsigned long long *)data = range->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(int *)data = (int)range->access; return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)data = range->pool; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
	struct pointer_facts facts;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(data && find_pointer(address, &facts));
	return facts.is_host ? host_attribute(data, attribute, address, &facts.host)
			     : device_attribute(data, attribute, address, &facts.device);
}

static size_t attribute_bytes(CUpointer_attribute attribute)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_MAPPED:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return 4;
	default: return 8;
	}
}

/* Unlike the single form, a pointer the driver does not know is no error: its attributes are 0, its device is -2. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(count && attributes && data);
	for (unsigned i = 0; i < count; i++) {
		SIM_REQUIRE(data[i]);
		memset(data[i], 0, attribute_bytes(attributes[i]));
		if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
			*(int *)data[i] = CU_DEVICE_INVALID;
		if (cuPointerGetAttribute(data[i], attributes[i], address) != CUDA_SUCCESS &&
		    attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER && !sim_memory_is_ours(address))
			*(void **)data[i] = (void *)(uintptr_t)address;     /* pageable memory is its own host pointer */
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
	struct pointer_facts facts;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(value && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && find_pointer(address, &facts));
	return CUDA_SUCCESS;    /* copies are ordered in any case */
}
