/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - allocations, fills and what a pointer is.
 *
 * Zero sizes and NULL are successes in the runtime where the driver refuses them.
 */
#include "simulated_runtime/runtime.h"
#include "simulated_runtime/streams.h"

static cudaError_t allocate(void **pointer, size_t bytes)
{
	CUdeviceptr device = 0;
	if (!pointer)
		return cudaErrorInvalidValue;
	RT_TRY(rt_context());
	if (bytes)
		RT_TRY(RT_CALL(cuMemAlloc_v2, &device, bytes));
	*pointer = (void *)(uintptr_t)device;
	return cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
	return rt_return(allocate(pointer, bytes));
}

static cudaError_t allocate_async(void **pointer, size_t bytes, cudaStream_t stream)
{
	CUdeviceptr device = 0;
	if (!pointer)
		return cudaErrorInvalidValue;
	RT_TRY(rt_context());
	if (bytes)
		RT_TRY(RT_CALL(cuMemAllocAsync, &device, bytes, stream));
	*pointer = (void *)(uintptr_t)device;
	return cudaSuccess;
}

STREAM_CALL(cudaMallocAsync, (void **pointer, size_t bytes, cudaStream_t stream), allocate_async(pointer, bytes, stream))

static cudaError_t allocate_managed(void **pointer, size_t bytes, unsigned int flags)
{
	CUdeviceptr device;
	if (!pointer)
		return cudaErrorInvalidValue;
	RT_TRY(rt_context());
	RT_TRY(RT_CALL(cuMemAllocManaged, &device, bytes, flags));
	*pointer = (void *)(uintptr_t)device;
	return cudaSuccess;
}

EXPORT cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags)
{
	return rt_return(allocate_managed(pointer, bytes, flags));
}

static cudaError_t allocate_host(void **pointer, size_t bytes, unsigned int flags)
{
	if (!pointer)
		return cudaErrorInvalidValue;
	*pointer = NULL;
	RT_TRY(rt_context());
	return bytes ? RT_CALL(cuMemHostAlloc, pointer, bytes, flags) : cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
	return rt_return(allocate_host(pointer, bytes, flags));
}

EXPORT cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
	return rt_return(allocate_host(pointer, bytes, 0));
}

/* NULL still makes a context: programs call cudaFree(0) for that. */
static cudaError_t release(void *pointer)
{
	RT_TRY(rt_context());
	return pointer ? RT_CALL(cuMemFree_v2, (CUdeviceptr)(uintptr_t)pointer) : cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *pointer)
{
	return rt_return(release(pointer));
}

static cudaError_t release_host(void *pointer)
{
	RT_TRY(rt_context());
	return pointer ? RT_CALL(cuMemFreeHost, pointer) : cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *pointer)
{
	return rt_return(release_host(pointer));
}

/* ---- fills ----------------------------------------------------------------------------------------------------------- */

static cudaError_t fill(void *pointer, int value, size_t bytes)
{
	RT_TRY(rt_context());
	return bytes ? RT_CALL(cuMemsetD8_v2, (CUdeviceptr)(uintptr_t)pointer, (unsigned char)value, bytes) : cudaSuccess;
}

static cudaError_t fill_async(void *pointer, int value, size_t bytes, cudaStream_t stream)
{
	RT_TRY(rt_context());
	return bytes ? RT_CALL(cuMemsetD8Async, (CUdeviceptr)(uintptr_t)pointer, (unsigned char)value, bytes, stream) : cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *pointer, int value, size_t bytes)
{
	return rt_return(fill(pointer, value, bytes));
}

EXPORT cudaError_t cudaMemset_ptds(void *pointer, int value, size_t bytes)
{
	return rt_return(fill_async(pointer, value, bytes, CU_STREAM_PER_THREAD));
}

STREAM_CALL(cudaMemsetAsync, (void *pointer, int value, size_t bytes, cudaStream_t stream), fill_async(pointer, value, bytes, stream))

/* ---- what a pointer is ----------------------------------------------------------------------------------------------- */

/* Memory that the driver does not know is a success, of type unregistered, on no device. */
static cudaError_t pointer_attributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
	unsigned int type = 0, managed = 0;
	int ordinal = CU_DEVICE_INVALID;
	CUdeviceptr device = 0;
	void *host = NULL;
	CUpointer_attribute asked[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
					CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
					CU_POINTER_ATTRIBUTE_HOST_POINTER };
	void *values[] = { &type, &managed, &ordinal, &device, &host };
	if (!attributes)
		return cudaErrorInvalidValue;
	RT_TRY(rt_context());
	RT_TRY(RT_CALL(cuPointerGetAttributes, sizeof(asked) / sizeof(*asked), asked, values, (CUdeviceptr)(uintptr_t)pointer));
	*attributes = (struct cudaPointerAttributes){ .device = CU_DEVICE_INVALID, .hostPointer = (void *)(uintptr_t)pointer };
	if (!type)
		return cudaSuccess;
	attributes->type = managed ? cudaMemoryTypeManaged : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
	attributes->device = ordinal;
	attributes->devicePointer = (void *)(uintptr_t)device;
	attributes->hostPointer = host;
	return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
	return rt_return(pointer_attributes(attributes, pointer));
}
