/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver that does nothing, as fast as possible: one device, every call succeeds, work takes no time. For measuring what the shim
 * adds on a driver that shares no code with the simulated one. It exports what aliquot-cuda-client and the shim look up by name. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Only what has to be written: so no header of the shim is needed, and a call that does nothing needs no arguments. */
typedef int CUresult, CUdevice;
typedef void *CUcontext, *CUstream, *CUevent;
typedef unsigned long long CUdeviceptr;
typedef struct {
	char bytes[16];
} CUuuid;

#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_DEVICE 101
#define GIB ((size_t)1 << 30)

static uint64_t next_address = 1ull << 40;
static char things[3]; /* what handles point to */

static void *handle_of(unsigned kind)
{
	return &things[kind];
}

CUresult cuDriverGetVersion(int *version)
{
	*version = 12080;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
	*count = 1;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	*device = ordinal;
	return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	(void)device;
	memset(uuid, 0x11, sizeof(*uuid));
	return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	(void)device;
	*bytes = 80 * GIB;
	return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *left, size_t *total)
{
	*left = *total = 80 * GIB;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	(void)device;
	*context = handle_of(0);
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	(void)device;
	*flags = 0;
	*active = 1;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
	*context = handle_of(0);
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	*device = 0;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
	(void)stream;
	return cuCtxGetCurrent(context);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	(void)flags;
	*stream = handle_of(1);
	return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, int attribute, void *function)
{
	(void)attribute, (void)function;
	*value = 0;
	return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	(void)flags;
	*event = handle_of(2);
	return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end)
{
	(void)begin, (void)end;
	*milliseconds = 0;
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	*address = __atomic_fetch_add(&next_address, (bytes + 511) & ~(size_t)511, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

#define DOES_NOTHING(name)           \
	CUresult name(void)          \
	{                            \
		return CUDA_SUCCESS; \
	}

DOES_NOTHING(cuArray3DCreate_v2)
DOES_NOTHING(cuArrayDestroy)
DOES_NOTHING(cuCtxCreate_v2)
DOES_NOTHING(cuCtxDestroy_v2)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxSynchronize)
DOES_NOTHING(cuDeviceGetGraphMemAttribute)
DOES_NOTHING(cuDeviceGetName)
DOES_NOTHING(cuDevicePrimaryCtxRelease_v2)
DOES_NOTHING(cuEventDestroy_v2)
DOES_NOTHING(cuEventQuery)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventSynchronize)
DOES_NOTHING(cuGetErrorName)
DOES_NOTHING(cuGraphAddKernelNode_v2)
DOES_NOTHING(cuGraphAddMemAllocNode)
DOES_NOTHING(cuGraphCreate)
DOES_NOTHING(cuGraphInstantiateWithFlags)
DOES_NOTHING(cuGraphLaunch)
DOES_NOTHING(cuInit)
DOES_NOTHING(cuLaunchCooperativeKernel)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuMemAddressReserve)
DOES_NOTHING(cuMemAllocAsync)
DOES_NOTHING(cuMemAllocFromPoolAsync)
DOES_NOTHING(cuMemAllocManaged)
DOES_NOTHING(cuMemAllocPitch_v2)
DOES_NOTHING(cuMemCreate)
DOES_NOTHING(cuMemFreeAsync)
DOES_NOTHING(cuMemFree_v2)
DOES_NOTHING(cuMemMap)
DOES_NOTHING(cuMemPoolCreate)
DOES_NOTHING(cuMemRelease)
DOES_NOTHING(cuMemUnmap)
DOES_NOTHING(cuMipmappedArrayCreate)
DOES_NOTHING(cuMipmappedArrayDestroy)
DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuModuleLoadData)
DOES_NOTHING(cuStreamSynchronize)
