/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver as an application finds it: opened at run time, by one of the ways programs in the wild use.
 *
 * This program links no code of the shim. Which way was taken matters to the shim, not to the rest of this program.
 */
#ifndef AQ_CLIENT_DRIVER_H
#define AQ_CLIENT_DRIVER_H

#include <stdbool.h>

#include "cuda_abi.h"

/* X(exported symbol, name for cuGetProcAddress) */
#define CLIENT_ENTRY_POINTS(X)                                                             \
	X(cuArray3DCreate_v2, "cuArray3DCreate")                                           \
	X(cuArrayDestroy, "cuArrayDestroy")                                                \
	X(cuCtxCreate_v2, "cuCtxCreate")                                                   \
	X(cuCtxDestroy_v2, "cuCtxDestroy")                                                 \
	X(cuCtxSetCurrent, "cuCtxSetCurrent")                                              \
	X(cuCtxSynchronize, "cuCtxSynchronize")                                            \
	X(cuDeviceGet, "cuDeviceGet")                                                      \
	X(cuDeviceGetCount, "cuDeviceGetCount")                                            \
	X(cuDeviceGetGraphMemAttribute, "cuDeviceGetGraphMemAttribute")                    \
	X(cuDeviceGetName, "cuDeviceGetName")                                              \
	X(cuDeviceGetUuid_v2, "cuDeviceGetUuid")                                           \
	X(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease")                       \
	X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")                            \
	X(cuDeviceTotalMem_v2, "cuDeviceTotalMem")                                         \
	X(cuEventCreate, "cuEventCreate")                                                  \
	X(cuEventRecord, "cuEventRecord")                                                  \
	X(cuEventSynchronize, "cuEventSynchronize")                                        \
	X(cuGetErrorName, "cuGetErrorName")                                                \
	X(cuGraphAddKernelNode_v2, "cuGraphAddKernelNode")                                 \
	X(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode")                                \
	X(cuGraphCreate, "cuGraphCreate")                                                  \
	X(cuGraphInstantiateWithFlags, "cuGraphInstantiate")                               \
	X(cuGraphLaunch, "cuGraphLaunch")                                                  \
	X(cuInit, "cuInit")                                                                \
	X(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel")                          \
	X(cuLaunchKernel, "cuLaunchKernel")                                                \
	X(cuLaunchKernelEx, "cuLaunchKernelEx")                                            \
	X(cuMemAddressReserve, "cuMemAddressReserve")                                      \
	X(cuMemAlloc_v2, "cuMemAlloc")                                                     \
	X(cuMemAllocAsync, "cuMemAllocAsync")                                              \
	X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync")                              \
	X(cuMemAllocManaged, "cuMemAllocManaged")                                          \
	X(cuMemAllocPitch_v2, "cuMemAllocPitch")                                           \
	X(cuMemCreate, "cuMemCreate")                                                      \
	X(cuMemFree_v2, "cuMemFree")                                                       \
	X(cuMemFreeAsync, "cuMemFreeAsync")                                                \
	X(cuMemGetInfo_v2, "cuMemGetInfo")                                                 \
	X(cuMemMap, "cuMemMap")                                                            \
	X(cuMemPoolCreate, "cuMemPoolCreate")                                              \
	X(cuMemRelease, "cuMemRelease")                                                    \
	X(cuMemUnmap, "cuMemUnmap")                                                        \
	X(cuMipmappedArrayCreate, "cuMipmappedArrayCreate")                                \
	X(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy")                              \
	X(cuModuleGetFunction, "cuModuleGetFunction")                                      \
	X(cuModuleLoadData, "cuModuleLoadData")                                            \
	X(cuStreamCreate, "cuStreamCreate")                                                \
	X(cuStreamSynchronize, "cuStreamSynchronize")

#define CLIENT_FIELD(symbol, base) __typeof__(&symbol) symbol;
struct driver {
	CLIENT_ENTRY_POINTS(CLIENT_FIELD)
};
#undef CLIENT_FIELD

/* The driver of this process; every command uses it. */
extern struct driver cu;

/* Open the driver by `route` ("dlsym", "getproc", "link", "dlvsym", "deepbind", "dlmopen") and fill `cu`.
 * False: the reason is on stderr. */
bool driver_open(const char *route);

/* The names of the routes, for the usage text. */
extern const char driver_routes[];

/* "CUDA_ERROR_OUT_OF_MEMORY", or a number where the driver does not know the code. */
const char *driver_error(CUresult result);

#endif
