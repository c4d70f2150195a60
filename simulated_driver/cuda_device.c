/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_device.c - queries about devices. The numbers come from the topology; the rest is fixed by the architecture. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "simulated_driver/cuda_internal.h"

struct sim_device *sim_device_of(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < sim_cuda.n_devices ? &sim_cuda.devices[ordinal] : NULL;
}

/* Every simulated device is one locality domain. */
struct sim_device *sim_device_at(const CUmemLocation *location, CUresult *why)
{
	bool is_domain = location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN;
	*why = CUDA_ERROR_NOT_SUPPORTED;
	if (location->type != CU_MEM_LOCATION_TYPE_DEVICE && !is_domain)
		return NULL;
	*why = is_domain ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
	return is_domain && location->id >> 8 ? NULL : sim_device_of(location->id);
}

struct sim_device *sim_device_of_domain(const struct sim_domain *domain)
{
	for (int i = 0; i < sim_cuda.n_devices; i++)
		if (sim_cuda.devices[i].domain.used_bytes == domain->used_bytes)
			return &sim_cuda.devices[i];
	return NULL;
}

#define DEVICE_OR_RETURN(variable, ordinal)                   \
	SIM_REQUIRE_READY();                                  \
	struct sim_device *variable = sim_device_of(ordinal); \
	if (!variable)                                        \
		return CUDA_ERROR_INVALID_DEVICE

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	SIM_REQUIRE(device);
	DEVICE_OR_RETURN(found, ordinal);
	*device = found->ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
	SIM_REQUIRE(count);
	SIM_REQUIRE_READY();
	*count = sim_cuda.n_devices;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal)
{
	SIM_REQUIRE(name && length > 0);
	DEVICE_OR_RETURN(device, ordinal);
	snprintf(name, (size_t)length, "%s", device->name);
	return CUDA_SUCCESS;
}

/* The old form names the GPU, the new one the MIG instance when there is one. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal)
{
	SIM_REQUIRE(uuid);
	DEVICE_OR_RETURN(device, ordinal);
	*uuid = device->gpu_uuid;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal)
{
	SIM_REQUIRE(uuid);
	DEVICE_OR_RETURN(device, ordinal);
	*uuid = device->uuid;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetLuid(char *luid, unsigned int *node_mask, CUdevice ordinal)
{
	SIM_REQUIRE(luid && node_mask);
	DEVICE_OR_RETURN(device, ordinal);
	(void)device;
	return CUDA_ERROR_NOT_SUPPORTED; /* exists on Windows only */
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal)
{
	SIM_REQUIRE(bytes);
	DEVICE_OR_RETURN(device, ordinal);
	*bytes = device->domain.capacity_bytes;
	return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice ordinal)
{
	SIM_REQUIRE(major && minor);
	DEVICE_OR_RETURN(device, ordinal);
	*major = (int)device->hardware->compute_major;
	*minor = (int)device->hardware->compute_minor;
	return CUDA_SUCCESS;
}

/* ---- attributes ------------------------------------------------------------------------------------------------------ */

/* Shared memory of one SM and of one block that opts in, in KiB, by compute capability (CUDA programming guide, technical
 * specifications). */
static void shared_memory_kib(const struct sim_gpu *gpu, int *per_sm, int *per_block)
{
	uint32_t capability = gpu->compute_major * 10 + gpu->compute_minor;
	if (capability >= 90 && capability < 120)
		*per_sm = 228;
	else if (capability == 80)
		*per_sm = 164;
	else if (capability == 75)
		*per_sm = 64;
	else
		*per_sm = 100;
	*per_block = capability == 75 ? 64 : *per_sm - 1;
}

static bool attribute_of_architecture(const struct sim_gpu *gpu, CUdevice_attribute attribute, int *value)
{
	int shared_per_sm, shared_per_block;
	bool hopper = gpu->compute_major >= 9;
	shared_memory_kib(gpu, &shared_per_sm, &shared_per_block);
	switch ((int)attribute) {
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; return true;
	case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 65536; return true;
	case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = 2147483647; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
	case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; return true;
	case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
	case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: *value = 512; return true;
	case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: *value = 32; return true;
	case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH: *value = 131072; return true;
	case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH: *value = 131072; return true;
	case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT: *value = 65536; return true;
	case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH:
	case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT:
	case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH: *value = 16384; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared_per_sm * 1024; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_per_block * 1024; return true;
	case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = gpu->compute_major >= 8 ? 1024 : 0; return true;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; return true;
	case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO: *value = gpu->compute_minor == 0 ? 2 : 32; return true;
	case CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT: *value = hopper ? 4 : 1; return true;
	case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
	case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: *value = hopper; return true;
	default: return false;
	}
}

/* What the simulated driver can do. Everything that is not here answers 0: not supported. */
static bool attribute_of_driver(CUdevice_attribute attribute, int *value)
{
	switch ((int)attribute) {
	case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
	case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
	case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
	case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
	case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
	case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
	case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
	case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; return true;
	case CU_DEVICE_ATTRIBUTE_NUMA_ID: *value = -1; return true;
	default: *value = 0; return (int)attribute >= 1 && (int)attribute <= 148; /* the range a 13.0 driver knows */
	}
}

static bool attribute_of_gpu(const struct sim_device *device, CUdevice_attribute attribute, int *value)
{
	const struct sim_gpu *gpu = device->hardware;
	switch ((int)attribute) {
	case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = (int)gpu->graphics_clock_mhz * 1000; return true;
	case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = (int)gpu->memory_clock_mhz * 1000; return true;
	case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = (int)gpu->memory_bus_bits; return true;
	case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = (int)gpu->l2_cache_bytes; return true;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)device->sm_count; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = (int)device->threads_per_sm; return true;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = (int)device->blocks_per_sm; return true;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
		*value = (int)atomic_load(&sim_cuda.state->settings.gpus[device->gpu].compute_mode);
		return true;
	case CU_DEVICE_ATTRIBUTE_ECC_ENABLED: *value = (int)gpu->ecc_enabled; return true;
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = (int)gpu->pci.domain; return true;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = (int)gpu->pci.bus; return true;
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = (int)gpu->pci.device; return true;
	case CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID: *value = (int)gpu->pci_device_id; return true;
	case CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID: *value = (int)gpu->pci_subsystem_id; return true;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = (int)gpu->compute_major; return true;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = (int)gpu->compute_minor; return true;
	case CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID: *value = device->ordinal; return true;
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = (int)gpu->numa_node; return true;
	default: return false;
	}
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice ordinal)
{
	SIM_REQUIRE(value);
	DEVICE_OR_RETURN(device, ordinal);
	int answer = 0;
	if (!attribute_of_gpu(device, attribute, &answer) && !attribute_of_architecture(device->hardware, attribute, &answer) &&
	    !attribute_of_driver(attribute, &answer))
		return CUDA_ERROR_INVALID_VALUE;
	*value = answer;
	return CUDA_SUCCESS;
}

static int attribute(const struct sim_device *device, CUdevice_attribute which)
{
	int value = 0;
	cuDeviceGetAttribute(&value, which, device->ordinal);
	return value;
}

CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice ordinal)
{
	SIM_REQUIRE(properties);
	DEVICE_OR_RETURN(device, ordinal);
	*properties = (CUdevprop){
		.maxThreadsPerBlock = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
		.maxThreadsDim = { attribute(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
				   attribute(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
				   attribute(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z) },
		.maxGridSize = { attribute(device, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
				 attribute(device, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
				 attribute(device, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z) },
		.sharedMemPerBlock = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
		.totalConstantMemory = attribute(device, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
		.SIMDWidth = attribute(device, CU_DEVICE_ATTRIBUTE_WARP_SIZE),
		.memPitch = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_PITCH),
		.regsPerBlock = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
		.clockRate = attribute(device, CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
		.textureAlign = attribute(device, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
	};
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *width, CUarray_format format, unsigned channels, CUdevice ordinal)
{
	CUDA_ARRAY3D_DESCRIPTOR texel = { .Format = format, .NumChannels = channels };
	SIM_REQUIRE(width && sim_array_texel_bytes(&texel));
	DEVICE_OR_RETURN(device, ordinal);
	(void)device;
	*width = (UINT64_C(1) << 28) * 4 / sim_array_texel_bytes(&texel);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice ordinal)
{
	SIM_REQUIRE(supported && type == CU_EXEC_AFFINITY_TYPE_SM_COUNT);
	DEVICE_OR_RETURN(device, ordinal);
	(void)device;
	*supported = 0; /* exists under MPS only */
	return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(int target, int scope)
{
	(void)target, (void)scope;
	SIM_REQUIRE_READY();
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- PCI ------------------------------------------------------------------------------------------------------------- */

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal)
{
	SIM_REQUIRE(text && length > 0);
	DEVICE_OR_RETURN(device, ordinal);
	const struct sim_pci_address *pci = &device->hardware->pci;
	snprintf(text, (size_t)length, "%04X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
	unsigned domain = 0, bus = 0, slot = 0, function = 0;
	SIM_REQUIRE(device && text);
	SIM_REQUIRE_READY();
	if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) {
		domain = 0;
		SIM_REQUIRE(sscanf(text, "%x:%x.%x", &bus, &slot, &function) >= 2);
	}
	for (int i = 0; i < sim_cuda.n_devices; i++) {
		const struct sim_pci_address *pci = &sim_cuda.devices[i].hardware->pci;
		if (pci->domain == domain && pci->bus == bus && pci->device == slot && function == 0) {
			*device = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_VALUE;
}

/* ---- peers ----------------------------------------------------------------------------------------------------------- */

/* By NVLink, or over PCIe when both hang on one host bridge. MIG instances have no peers. */
bool sim_devices_linked(const struct sim_device *a, const struct sim_device *b, bool *by_nvlink)
{
	*by_nvlink = false;
	if (a == b || a->is_mig || b->is_mig)
		return false;
	*by_nvlink = sim_topology_nvlinks_between(&sim_cuda.state->topology, a->hardware, b->hardware) > 0;
	return *by_nvlink || sim_topology_common_ancestor(a->hardware, b->hardware) <= 30;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice ordinal, CUdevice peer_ordinal)
{
	bool by_nvlink;
	SIM_REQUIRE(can);
	DEVICE_OR_RETURN(device, ordinal);
	DEVICE_OR_RETURN(peer, peer_ordinal);
	*can = sim_devices_linked(device, peer, &by_nvlink);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute which, CUdevice ordinal, CUdevice peer_ordinal)
{
	bool by_nvlink;
	SIM_REQUIRE(value);
	DEVICE_OR_RETURN(device, ordinal);
	DEVICE_OR_RETURN(peer, peer_ordinal);
	if (device == peer)
		return CUDA_ERROR_INVALID_DEVICE;
	bool linked = sim_devices_linked(device, peer, &by_nvlink);
	switch (which) {
	case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: *value = by_nvlink ? 0 : 1; return CUDA_SUCCESS;
	case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
	case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: *value = linked; return CUDA_SUCCESS;
	case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: *value = by_nvlink; return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_VALUE;
}
