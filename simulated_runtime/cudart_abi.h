/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public ABI of the CUDA runtime library, as far as the simulated runtime exports it.
 *
 * Why it exists: no CUDA toolkit is needed to build. Names, numbers and layouts are NVIDIA's interface; the text is ours. Handles and
 * enumerations that the runtime shares with the driver have the driver's types here (cuda_abi.h), so most calls forward without a cast.
 * Invariant: every size and offset is what `cuda_runtime_api.h` of the chosen major version says on a 64-bit system. The assertions below
 * hold them, and tests/unit/simulated_runtime compares them with NVIDIA's headers.
 *
 * RUNTIME_MAJOR is 12 or 13: the library's major version. Structures and signatures that differ depend on it.
 */
/* A table of declarations, aligned by hand. */
/* clang-format off */
#ifndef ALIQUOT_CUDART_ABI_H
#define ALIQUOT_CUDART_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

#ifndef RUNTIME_MAJOR
#define RUNTIME_MAJOR 13
#endif

typedef enum cudaError {
#define ERROR(name, number, text) name = number,
#include "simulated_runtime/errors.def"
#undef ERROR
} cudaError_t;

typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
typedef CUgraph cudaGraph_t;
typedef CUgraphNode cudaGraphNode_t;
typedef CUgraphExec cudaGraphExec_t;
typedef CUkernel cudaKernel_t;
typedef CUlibrary cudaLibrary_t;
typedef CUmemoryPool cudaMemPool_t;
typedef CUuserObject cudaUserObject_t;
typedef void (*cudaStreamCallback_t)(cudaStream_t stream, cudaError_t status, void *user_data);

typedef struct dim3 { unsigned int x, y, z; } dim3;

enum cudaMemcpyKind {
	cudaMemcpyHostToHost = 0,
	cudaMemcpyHostToDevice = 1,
	cudaMemcpyDeviceToHost = 2,
	cudaMemcpyDeviceToDevice = 3,
	cudaMemcpyDefault = 4
};

/* Not the driver's numbers: its 3 is an array. */
enum cudaMemoryType {
	cudaMemoryTypeUnregistered = 0,
	cudaMemoryTypeHost = 1,
	cudaMemoryTypeDevice = 2,
	cudaMemoryTypeManaged = 3
};

struct cudaPointerAttributes {
	enum cudaMemoryType type;
	int device;
	void *devicePointer;
	void *hostPointer;
#if RUNTIME_MAJOR >= 13
	long reserved[8];
#endif
};

struct cudaFuncAttributes {
	size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
	int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA;
	int maxDynamicSharedSizeBytes, preferredShmemCarveout;
	int clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
	int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed;
	int reserved[16];
};

typedef struct cudaLaunchConfig_st {
	dim3 gridDim, blockDim;
	size_t dynamicSmemBytes;
	cudaStream_t stream;
	CUlaunchAttribute *attrs;
	unsigned int numAttrs;
} cudaLaunchConfig_t;

struct cudaPitchedPtr {
	void *ptr;
	size_t pitch, xsize, ysize;
};
struct cudaPos { size_t x, y, z; };
struct cudaExtent { size_t width, height, depth; };

struct cudaMemcpy3DParms {
	CUarray srcArray;
	struct cudaPos srcPos;
	struct cudaPitchedPtr srcPtr;
	CUarray dstArray;
	struct cudaPos dstPos;
	struct cudaPitchedPtr dstPtr;
	struct cudaExtent extent;
	enum cudaMemcpyKind kind;
};

struct cudaMemcpyNodeParams {
	int flags;
	int reserved;
	CUcontext ctx;
	struct cudaMemcpy3DParms copyParams;
};

struct cudaKernelNodeParamsV2 {
	const void *func;
	dim3 gridDim, blockDim;
	unsigned int sharedMemBytes;
	void **kernelParams;
	void **extra;
#if RUNTIME_MAJOR >= 13
	CUcontext ctx;
	int functionType;
#endif
};

struct cudaConditionalNodeParams {
	CUgraphConditionalHandle handle;
	int type;
	unsigned int size;
	cudaGraph_t *phGraph_out;
#if RUNTIME_MAJOR >= 13
	CUcontext ctx;
#endif
};

/* The same as the driver's, except for kernels (named by their host function), copies and the context of a conditional node. */
struct cudaGraphNodeParams {
	CUgraphNodeType type;
	int reserved0[3];
	union {
		long long reserved1[29];
		struct cudaKernelNodeParamsV2 kernel;
		struct cudaMemcpyNodeParams memcpy;
		struct cudaConditionalNodeParams conditional;
	};
	long long reserved2;
};

/* What the compiler leaves in a program for one binary (fatbinary_section.h). Version 2: separately compiled code, linked already. */
#define FATBIN_WRAPPER_MAGIC 0x466243b1
struct fatbin_wrapper {
	int magic;
	int version;
	const void *data;
	void *filename_or_fatbins;
};

/* The fields of both versions are in the header's order; those under V12 are gone since CUDA 13. */
#if RUNTIME_MAJOR == 12
#define V12(field) field
#define PROPERTIES_RESERVED 63
#else
#define V12(field)
#define PROPERTIES_RESERVED 56
#endif

struct cudaDeviceProp {
	char name[256];
	CUuuid uuid;
	char luid[8];
	unsigned int luidDeviceNodeMask;
	size_t totalGlobalMem, sharedMemPerBlock;
	int regsPerBlock, warpSize;
	size_t memPitch;
	int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
	V12(int clockRate;)
	size_t totalConstMem;
	int major, minor;
	size_t textureAlignment, texturePitchAlignment;
	V12(int deviceOverlap;)
	int multiProcessorCount;
	V12(int kernelExecTimeoutEnabled;)
	int integrated, canMapHostMemory;
	V12(int computeMode;)
	int maxTexture1D, maxTexture1DMipmap;
	V12(int maxTexture1DLinear;)
	int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2];
	int maxTexture3D[3], maxTexture3DAlt[3], maxTextureCubemap;
	int maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2];
	int maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3];
	int maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
	size_t surfaceAlignment;
	int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
	V12(int memoryClockRate;)
	int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported;
	int globalL1CacheSupported, localL1CacheSupported;
	size_t sharedMemPerMultiprocessor;
	int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
	V12(int singleToDoublePrecisionPerfRatio;)
	int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
	int cooperativeLaunch;
	V12(int cooperativeMultiDeviceLaunch;)
	size_t sharedMemPerBlockOptin;
	int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
	int accessPolicyMaxWindowSize;
	size_t reservedSharedMemPerBlock;
	int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported, timelineSemaphoreInteropSupported;
	int memoryPoolsSupported, gpuDirectRDMASupported;
	unsigned int gpuDirectRDMAFlushWritesOptions;
	int gpuDirectRDMAWritesOrdering;
	unsigned int memoryPoolSupportedHandleTypes;
	int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
#if RUNTIME_MAJOR >= 13
	int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
	unsigned int gpuPciDeviceID, gpuPciSubsystemID;
	int hostNumaMultinodeIpcSupported;
#endif
	int reserved[PROPERTIES_RESERVED];
};

static_assert(sizeof(struct cudaDeviceProp) == (RUNTIME_MAJOR == 12 ? 1032 : 1008), "cudaDeviceProp");
static_assert(sizeof(struct cudaFuncAttributes) == 144, "cudaFuncAttributes");
static_assert(sizeof(struct cudaPointerAttributes) == (RUNTIME_MAJOR == 12 ? 24 : 88), "cudaPointerAttributes");
static_assert(sizeof(cudaLaunchConfig_t) == 56, "cudaLaunchConfig_t");
static_assert(sizeof(struct cudaMemcpy3DParms) == 160, "cudaMemcpy3DParms");
static_assert(sizeof(struct cudaMemcpyNodeParams) == 176, "cudaMemcpyNodeParams");
static_assert(sizeof(struct cudaKernelNodeParamsV2) == (RUNTIME_MAJOR == 12 ? 56 : 72), "cudaKernelNodeParamsV2");
static_assert(sizeof(struct cudaConditionalNodeParams) == (RUNTIME_MAJOR == 12 ? 24 : 32), "cudaConditionalNodeParams");
static_assert(sizeof(struct cudaGraphNodeParams) == 256 && sizeof(CUgraphNodeParams) == 256, "cudaGraphNodeParams");
static_assert(offsetof(struct cudaGraphNodeParams, kernel) == offsetof(CUgraphNodeParams, kernel), "cudaGraphNodeParams");
static_assert(sizeof(struct fatbin_wrapper) == 24, "fatbin wrapper");

/* ---- entry points: FN(name, parameters); FN_PTSZ and FN_PTDS have a twin for per-thread default streams ----------------- */

#pragma GCC visibility push(default)

#define FN(name, ...) cudaError_t name(__VA_ARGS__)
#define FN_PTSZ(name, ...) FN(name, __VA_ARGS__); FN(name##_ptsz, __VA_ARGS__)
#define FN_PTDS(name, ...) FN(name, __VA_ARGS__); FN(name##_ptds, __VA_ARGS__)

/* registration and launches */
void **__cudaRegisterFatBinary(void *wrapper);
void __cudaRegisterFatBinaryEnd(void **handle);
char __cudaInitModule(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int thread_limit,
	void *unused_tid, void *unused_bid, dim3 *unused_block, dim3 *unused_grid, int *unused_warp);
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes, int constant,
	int global);
void __cudaUnregisterFatBinary(void **handle);
FN(__cudaGetKernel, CUkernel *kernel, const void *function);
unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
FN(__cudaPopCallConfiguration, dim3 *grid, dim3 *block, size_t *shared, cudaStream_t *stream);
FN_PTSZ(cudaLaunchKernelExC, const cudaLaunchConfig_t *config, const void *function, void **arguments);
FN_PTSZ(__cudaLaunchKernel, CUkernel kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream);
FN_PTSZ(cudaLaunchKernel, const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream);
FN_PTSZ(cudaLaunchCooperativeKernel, const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
	cudaStream_t stream);

/* versions and errors */
FN(cudaRuntimeGetVersion, int *version);
FN(cudaDriverGetVersion, int *version);
FN(cudaGetDriverEntryPointByVersion, const char *symbol, void **function, unsigned int version, unsigned long long flags,
	int *status);
FN(cudaGetDriverEntryPoint, const char *symbol, void **function, unsigned long long flags, int *status);
FN(cudaGetLastError, void);
FN(cudaPeekAtLastError, void);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
FN(cudaProfilerStart, void);
FN(cudaProfilerStop, void);

/* devices */
FN(cudaGetDevice, int *ordinal);
FN(cudaSetDevice, int ordinal);
FN(cudaGetDeviceCount, int *count);
FN(cudaDeviceEnablePeerAccess, int peer, unsigned int flags);
FN(cudaDeviceGetAttribute, int *value, CUdevice_attribute attribute, int ordinal);
FN(cudaDeviceGetPCIBusId, char *text, int bytes, int ordinal);
FN(cudaDeviceCanAccessPeer, int *can, int ordinal, int peer_ordinal);
FN(cudaDeviceGetDefaultMemPool, cudaMemPool_t *pool, int ordinal);
FN(cudaDeviceGetGraphMemAttribute, int ordinal, CUgraphMem_attribute attribute, void *value);
FN(cudaDeviceSetGraphMemAttribute, int ordinal, CUgraphMem_attribute attribute, void *value);
FN(cudaDeviceSynchronize, void);
FN(cudaDeviceGetStreamPriorityRange, int *least, int *greatest);
#if RUNTIME_MAJOR == 12
FN(cudaGetDeviceProperties_v2, struct cudaDeviceProp *properties, int ordinal);
#else
FN(cudaGetDeviceProperties, struct cudaDeviceProp *properties, int ordinal);
#endif

/* functions and libraries */
FN(cudaGetSymbolAddress, void **address, const void *symbol);
FN(cudaLibraryLoadData, cudaLibrary_t *library, const void *code, CUjit_option *options, void **values, unsigned int count,
	CUlibraryOption *library_options, void **library_values, unsigned int library_count);
FN(cudaLibraryLoadFromFile, cudaLibrary_t *library, const char *path, CUjit_option *options, void **values, unsigned int count,
	CUlibraryOption *library_options, void **library_values, unsigned int library_count);
FN(cudaLibraryUnload, cudaLibrary_t library);
FN(cudaLibraryGetKernel, cudaKernel_t *kernel, cudaLibrary_t library, const char *name);
FN(cudaLibraryGetKernelCount, unsigned int *count, cudaLibrary_t library);
FN(cudaLibraryGetGlobal, void **address, size_t *bytes, cudaLibrary_t library, const char *name);
FN(cudaLibraryGetManaged, void **address, size_t *bytes, cudaLibrary_t library, const char *name);
FN(cudaLibraryGetUnifiedFunction, void **function, cudaLibrary_t library, const char *name);
FN(cudaFuncGetAttributes, struct cudaFuncAttributes *attributes, const void *function);
FN(cudaFuncSetAttribute, const void *function, CUfunction_attribute attribute, int value);
FN(cudaKernelSetAttributeForDevice, CUkernel kernel, CUfunction_attribute attribute, int value, int ordinal);
FN(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int *blocks, const void *function, int block_size, size_t shared);
FN(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int *blocks, const void *function, int block_size, size_t shared,
	unsigned int flags);

/* graphs and captures */
FN(cudaGraphConditionalHandleCreate, CUgraphConditionalHandle *handle, cudaGraph_t graph, unsigned int value, unsigned int flags);
FN_PTSZ(cudaStreamBeginCapture, cudaStream_t stream, CUstreamCaptureMode mode);
FN_PTSZ(cudaStreamBeginCaptureToGraph, cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *nodes,
	const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode);
FN_PTSZ(cudaStreamEndCapture, cudaStream_t stream, cudaGraph_t *graph);
FN(cudaThreadExchangeStreamCaptureMode, CUstreamCaptureMode *mode);
FN(cudaGraphDestroy, cudaGraph_t graph);
FN(cudaGraphGetNodes, cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);
FN(cudaGraphNodeGetType, cudaGraphNode_t node, CUgraphNodeType *type);
FN(cudaGraphAddEmptyNode, cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, size_t count);
FN(cudaGraphInstantiate, cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags);
FN(cudaGraphInstantiateWithFlags, cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags);
FN(cudaGraphExecDestroy, cudaGraphExec_t executable);
FN_PTSZ(cudaGraphLaunch, cudaGraphExec_t executable, cudaStream_t stream);
FN(cudaGraphDebugDotPrint, cudaGraph_t graph, const char *path, unsigned int flags);
FN(cudaGraphRetainUserObject, cudaGraph_t graph, cudaUserObject_t object, unsigned int count, unsigned int flags);
FN(cudaUserObjectCreate, cudaUserObject_t *object, void *data, CUhostFn destroy, unsigned int count, unsigned int flags);
FN(cudaUserObjectRelease, cudaUserObject_t object, unsigned int count);
#if RUNTIME_MAJOR == 12
FN(cudaGraphAddNode, cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, size_t count,
	struct cudaGraphNodeParams *params);
FN(cudaGraphAddNode_v2, cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
	size_t count, struct cudaGraphNodeParams *params);
FN_PTSZ(cudaStreamGetCaptureInfo_v2, cudaStream_t stream, CUstreamCaptureStatus *status, unsigned long long *id,
	cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *count);
FN_PTSZ(cudaStreamGetCaptureInfo_v3, cudaStream_t stream, CUstreamCaptureStatus *status, unsigned long long *id,
	cudaGraph_t *graph, const cudaGraphNode_t **nodes, const CUgraphEdgeData **edges, size_t *count);
FN_PTSZ(cudaStreamUpdateCaptureDependencies, cudaStream_t stream, cudaGraphNode_t *nodes, size_t count, unsigned int flags);
FN_PTSZ(cudaStreamUpdateCaptureDependencies_v2, cudaStream_t stream, cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
	size_t count, unsigned int flags);
FN(cudaGraphNodeGetDependencies, cudaGraphNode_t node, cudaGraphNode_t *nodes, size_t *count);
FN(cudaGraphNodeGetDependencies_v2, cudaGraphNode_t node, cudaGraphNode_t *nodes, CUgraphEdgeData *edges, size_t *count);
#else
FN(cudaGraphAddNode, cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
	size_t count, struct cudaGraphNodeParams *params);
FN_PTSZ(cudaStreamGetCaptureInfo, cudaStream_t stream, CUstreamCaptureStatus *status, unsigned long long *id,
	cudaGraph_t *graph, const cudaGraphNode_t **nodes, const CUgraphEdgeData **edges, size_t *count);
FN_PTSZ(cudaStreamUpdateCaptureDependencies, cudaStream_t stream, cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
	size_t count, unsigned int flags);
FN(cudaGraphNodeGetDependencies, cudaGraphNode_t node, cudaGraphNode_t *nodes, CUgraphEdgeData *edges, size_t *count);
#endif

/* streams and events */
FN(cudaStreamCreate, cudaStream_t *created);
FN(cudaStreamCreateWithFlags, cudaStream_t *created, unsigned int flags);
FN(cudaStreamCreateWithPriority, cudaStream_t *created, unsigned int flags, int priority);
FN(cudaStreamDestroy, cudaStream_t stream);
FN_PTSZ(cudaStreamQuery, cudaStream_t stream);
FN_PTSZ(cudaStreamSynchronize, cudaStream_t stream);
FN_PTSZ(cudaStreamGetPriority, cudaStream_t stream, int *priority);
FN_PTSZ(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned int flags);
FN_PTSZ(cudaStreamAddCallback, cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned int flags);
FN_PTSZ(cudaLaunchHostFunc, cudaStream_t stream, CUhostFn function, void *data);
FN(cudaEventCreate, cudaEvent_t *event);
FN(cudaEventCreateWithFlags, cudaEvent_t *event, unsigned int flags);
FN(cudaEventDestroy, cudaEvent_t event);
FN(cudaEventQuery, cudaEvent_t event);
FN(cudaEventSynchronize, cudaEvent_t event);
FN_PTSZ(cudaEventRecord, cudaEvent_t event, cudaStream_t stream);
FN_PTSZ(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned int flags);
FN_PTSZ(cudaStreamIsCapturing, cudaStream_t stream, CUstreamCaptureStatus *status);
#if RUNTIME_MAJOR == 12
FN(cudaEventElapsedTime, float *milliseconds, cudaEvent_t start, cudaEvent_t end);
FN(cudaEventElapsedTime_v2, float *milliseconds, cudaEvent_t start, cudaEvent_t end);
#else
FN(cudaEventElapsedTime, float *milliseconds, cudaEvent_t start, cudaEvent_t end);
#endif

/* memory */
FN(cudaMalloc, void **pointer, size_t bytes);
FN(cudaMallocManaged, void **pointer, size_t bytes, unsigned int flags);
FN(cudaHostAlloc, void **pointer, size_t bytes, unsigned int flags);
FN(cudaMallocHost, void **pointer, size_t bytes);
FN(cudaFree, void *pointer);
FN(cudaFreeHost, void *pointer);
FN_PTDS(cudaMemset, void *pointer, int value, size_t bytes);
FN(cudaPointerGetAttributes, struct cudaPointerAttributes *attributes, const void *pointer);
FN_PTSZ(cudaMallocAsync, void **pointer, size_t bytes, cudaStream_t stream);
FN_PTSZ(cudaMemsetAsync, void *pointer, int value, size_t bytes, cudaStream_t stream);
FN_PTDS(cudaMemcpy, void *to, const void *from, size_t bytes, int kind);
FN_PTDS(cudaMemcpyToSymbol, const void *symbol, const void *from, size_t bytes, size_t offset, int kind);
FN_PTSZ(cudaMemcpyAsync, void *to, const void *from, size_t bytes, int kind, cudaStream_t stream);
FN_PTSZ(cudaMemcpy2DAsync, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
	int kind, cudaStream_t stream);
FN_PTSZ(cudaMemcpyPeerAsync, void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream);
FN(cudaMemGetInfo, size_t *free_bytes, size_t *total_bytes);
FN(cudaHostRegister, void *pointer, size_t bytes, unsigned int flags);
FN(cudaHostUnregister, void *pointer);
FN_PTSZ(cudaFreeAsync, void *pointer, cudaStream_t stream);
FN(cudaMemPoolTrimTo, cudaMemPool_t pool, size_t bytes_to_keep);
FN(cudaMemPoolSetAttribute, cudaMemPool_t pool, CUmemPool_attribute attribute, void *value);
FN(cudaMemPoolGetAttribute, cudaMemPool_t pool, CUmemPool_attribute attribute, void *value);
FN(cudaMemPoolSetAccess, cudaMemPool_t pool, const CUmemAccessDesc *descriptions, size_t count);
FN(cudaIpcGetMemHandle, CUipcMemHandle *handle, void *pointer);
FN(cudaIpcOpenMemHandle, void **pointer, CUipcMemHandle handle, unsigned int flags);
FN(cudaIpcCloseMemHandle, void *pointer);
FN(cudaIpcGetEventHandle, CUipcEventHandle *handle, cudaEvent_t event);
FN(cudaIpcOpenEventHandle, cudaEvent_t *event, CUipcEventHandle handle);

#undef FN
#undef FN_PTSZ
#undef FN_PTDS

#pragma GCC visibility pop

#endif
