/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public ABI of the CUDA driver library, as far as Aliquot uses it.
 *
 * Why it exists: the shim and the simulated driver must be built on machines that have no CUDA toolkit. Names, numbers and layouts below
 * are NVIDIA's interface; the text is ours. Invariant: every size, offset, enumerator and signature is what `cuda.h` of CUDA 13 says on a
 * 64-bit system. Entry points have their true exported names (`cuMemAlloc_v2`, never the source-level alias `cuMemAlloc`), because a
 * library that exports them must not be subject to renaming macros. A name without suffix next to a suffixed one is the older ABI (for
 * memory: 32-bit pointers and sizes).
 *
 * Twins: the default stream of an entry point ending in `_ptsz` or `_ptds` is the calling thread's own stream. The NVML ABI is in
 * nvml_abi.h.
 */

/* A table of declarations, aligned by hand. */
/* clang-format off */
#ifndef ALIQUOT_CUDA_ABI_H
#define ALIQUOT_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

/* ---- scalars and handles --------------------------------------------------------------------------------------------- */

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned int CUdeviceptr_v1;
typedef unsigned long long CUtexObject;
typedef unsigned long long CUsurfObject;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef cuuint64_t CUgraphConditionalHandle;

typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUarray_st *CUarray;
typedef struct CUtexref_st *CUtexref;
typedef struct CUsurfref_st *CUsurfref;
typedef struct CUmipmappedArray_st *CUmipmappedArray;
typedef struct CUevent_st *CUevent;
typedef struct CUstream_st *CUstream;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUuserObject_st *CUuserObject;
typedef cuuint64_t CUgraphConditionalHandle;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUextMemory_st *CUexternalMemory;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;
typedef struct CUlinkState_st *CUlinkState;
typedef struct CUuserObject_st *CUuserObject;
typedef struct CUgraphDeviceUpdatableNode_st *CUgraphDeviceNode;

typedef struct CUuuid_st { char bytes[16]; } CUuuid;

#define CU_IPC_HANDLE_SIZE 64
typedef struct CUipcMemHandle_st { char reserved[CU_IPC_HANDLE_SIZE]; } CUipcMemHandle;
typedef struct CUipcEventHandle_st { char reserved[CU_IPC_HANDLE_SIZE]; } CUipcEventHandle;

#define CU_DEVICE_CPU ((CUdevice)-1)
#define CU_DEVICE_INVALID ((CUdevice)-2)
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef void (*CUhostFn)(void *user_data);
typedef size_t (*CUoccupancyB2DSize)(int block_size);

/* ---- result codes ---------------------------------------------------------------------------------------------------- */

typedef enum cudaError_enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_DEINITIALIZED = 4,
	CUDA_ERROR_PROFILER_DISABLED = 5,
	CUDA_ERROR_PROFILER_NOT_INITIALIZED = 6,
	CUDA_ERROR_PROFILER_ALREADY_STARTED = 7,
	CUDA_ERROR_PROFILER_ALREADY_STOPPED = 8,
	CUDA_ERROR_STUB_LIBRARY = 34,
	CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER = 36,
	CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_DEVICE_NOT_LICENSED = 102,
	CUDA_ERROR_INVALID_IMAGE = 200,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_CONTEXT_ALREADY_CURRENT = 202,
	CUDA_ERROR_MAP_FAILED = 205,
	CUDA_ERROR_UNMAP_FAILED = 206,
	CUDA_ERROR_ARRAY_IS_MAPPED = 207,
	CUDA_ERROR_ALREADY_MAPPED = 208,
	CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
	CUDA_ERROR_ALREADY_ACQUIRED = 210,
	CUDA_ERROR_NOT_MAPPED = 211,
	CUDA_ERROR_NOT_MAPPED_AS_ARRAY = 212,
	CUDA_ERROR_NOT_MAPPED_AS_POINTER = 213,
	CUDA_ERROR_ECC_UNCORRECTABLE = 214,
	CUDA_ERROR_UNSUPPORTED_LIMIT = 215,
	CUDA_ERROR_CONTEXT_ALREADY_IN_USE = 216,
	CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
	CUDA_ERROR_INVALID_PTX = 218,
	CUDA_ERROR_INVALID_GRAPHICS_CONTEXT = 219,
	CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
	CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
	CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
	CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY = 224,
	CUDA_ERROR_CONTAINED = 226,
	CUDA_ERROR_INVALID_SOURCE = 300,
	CUDA_ERROR_FILE_NOT_FOUND = 301,
	CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
	CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_ILLEGAL_STATE = 401,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700,
	CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
	CUDA_ERROR_LAUNCH_TIMEOUT = 702,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
	CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
	CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
	CUDA_ERROR_ASSERT = 710,
	CUDA_ERROR_TOO_MANY_PEERS = 711,
	CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
	CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
	CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
	CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
	CUDA_ERROR_MISALIGNED_ADDRESS = 716,
	CUDA_ERROR_LAUNCH_FAILED = 719,
	CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
	CUDA_ERROR_NOT_PERMITTED = 800,
	CUDA_ERROR_NOT_SUPPORTED = 801,
	CUDA_ERROR_SYSTEM_NOT_READY = 802,
	CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
	CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
	CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
	CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
	CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
	CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
	CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
	CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
	CUDA_ERROR_TIMEOUT = 909,
	CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
	CUDA_ERROR_EXTERNAL_DEVICE = 911,
	CUDA_ERROR_INVALID_CLUSTER_SIZE = 912,
	CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
	CUDA_ERROR_UNKNOWN = 999
} CUresult;

/* ---- devices and contexts -------------------------------------------------------------------------------------------- */

typedef enum CUdevice_attribute_enum {
	CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
	CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X = 2,
	CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y = 3,
	CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z = 4,
	CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X = 5,
	CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y = 6,
	CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z = 7,
	CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8,
	CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY = 9,
	CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
	CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11,
	CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK = 12,
	CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
	CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT = 14,
	CU_DEVICE_ATTRIBUTE_GPU_OVERLAP = 15,
	CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
	CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT = 17,
	CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
	CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
	CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
	CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH = 21,
	CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH = 22,
	CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT = 23,
	CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH = 24,
	CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT = 25,
	CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH = 26,
	CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT = 30,
	CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS = 31,
	CU_DEVICE_ATTRIBUTE_ECC_ENABLED = 32,
	CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
	CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
	CU_DEVICE_ATTRIBUTE_TCC_DRIVER = 35,
	CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
	CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
	CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
	CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
	CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
	CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
	CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
	CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT = 51,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
	CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
	CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED = 79,
	CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED = 80,
	CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
	CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
	CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
	CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD = 84,
	CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID = 85,
	CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED = 86,
	CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO = 87,
	CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
	CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
	CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED = 90,
	CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
	CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1 = 92,
	CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1 = 93,
	CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1 = 94,
	CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
	CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH = 96,
	CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
	CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98,
	CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
	CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES = 100,
	CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST = 101,
	CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED = 104,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED = 105,
	CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
	CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED = 107,
	CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE = 108,
	CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE = 109,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
	CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
	CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED = 112,
	CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113,
	CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED = 114,
	CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
	CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
	CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH = 120,
	CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED = 121,
	CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
	CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR = 123,
	CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
	CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED = 125,
	CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT = 126,
	CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED = 127,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
	CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS = 129,
	CU_DEVICE_ATTRIBUTE_NUMA_CONFIG = 130,
	CU_DEVICE_ATTRIBUTE_NUMA_ID = 131,
	CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132,
	CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,
	CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID = 139,
	CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID = 140,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED = 142,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED = 143,
	CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED = 144,
	CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145
} CUdevice_attribute;

typedef enum CUdevice_P2PAttribute_enum {
	CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1,
	CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2,
	CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3,
	CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED = 4
} CUdevice_P2PAttribute;

typedef enum CUcomputemode_enum {
	CU_COMPUTEMODE_DEFAULT = 0,
	CU_COMPUTEMODE_PROHIBITED = 2,
	CU_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
} CUcomputemode;

typedef enum CUctx_flags_enum {
	CU_CTX_SCHED_AUTO = 0x00,
	CU_CTX_SCHED_SPIN = 0x01,
	CU_CTX_SCHED_YIELD = 0x02,
	CU_CTX_SCHED_BLOCKING_SYNC = 0x04,
	CU_CTX_SCHED_MASK = 0x07,
	CU_CTX_MAP_HOST = 0x08,
	CU_CTX_LMEM_RESIZE_TO_MAX = 0x10,
	CU_CTX_COREDUMP_ENABLE = 0x20,
	CU_CTX_USER_COREDUMP_ENABLE = 0x40,
	CU_CTX_SYNC_MEMOPS = 0x80,
	CU_CTX_FLAGS_MASK = 0xFF
} CUctx_flags;

typedef enum CUlimit_enum {
	CU_LIMIT_STACK_SIZE = 0,
	CU_LIMIT_PRINTF_FIFO_SIZE = 1,
	CU_LIMIT_MALLOC_HEAP_SIZE = 2,
	CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH = 3,
	CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT = 4,
	CU_LIMIT_MAX_L2_FETCH_GRANULARITY = 5,
	CU_LIMIT_PERSISTING_L2_CACHE_SIZE = 6
} CUlimit;

typedef enum CUfunc_cache_enum {
	CU_FUNC_CACHE_PREFER_NONE = 0,
	CU_FUNC_CACHE_PREFER_SHARED = 1,
	CU_FUNC_CACHE_PREFER_L1 = 2,
	CU_FUNC_CACHE_PREFER_EQUAL = 3
} CUfunc_cache;

typedef enum CUsharedconfig_enum {
	CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE = 0,
	CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE = 1,
	CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE = 2
} CUsharedconfig;

typedef enum CUexecAffinityType_enum { CU_EXEC_AFFINITY_TYPE_SM_COUNT = 0 } CUexecAffinityType;

typedef struct CUexecAffinityParam_st {
	CUexecAffinityType type;
	union {
		struct { unsigned int val; } smCount;
	} param;
} CUexecAffinityParam;

typedef struct CUctxCreateParams_st {
	CUexecAffinityParam *execAffinityParams;
	int numExecAffinityParams;
	void *cigParams;
} CUctxCreateParams;

typedef struct CUdevprop_st {
	int maxThreadsPerBlock;
	int maxThreadsDim[3];
	int maxGridSize[3];
	int sharedMemPerBlock;
	int totalConstantMemory;
	int SIMDWidth;
	int memPitch;
	int regsPerBlock;
	int clockRate;
	int textureAlign;
} CUdevprop;

/* ---- linear memory --------------------------------------------------------------------------------------------------- */

typedef enum CUmemorytype_enum {
	CU_MEMORYTYPE_HOST = 1,
	CU_MEMORYTYPE_DEVICE = 2,
	CU_MEMORYTYPE_ARRAY = 3,
	CU_MEMORYTYPE_UNIFIED = 4
} CUmemorytype;

#define CU_MEMHOSTALLOC_PORTABLE 0x01
#define CU_MEMHOSTALLOC_DEVICEMAP 0x02
#define CU_MEMHOSTALLOC_WRITECOMBINED 0x04
#define CU_MEMHOSTREGISTER_PORTABLE 0x01
#define CU_MEMHOSTREGISTER_DEVICEMAP 0x02
#define CU_MEMHOSTREGISTER_IOMEMORY 0x04
#define CU_MEMHOSTREGISTER_READ_ONLY 0x08
#define CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS 0x1

typedef enum CUmemAttach_flags_enum {
	CU_MEM_ATTACH_GLOBAL = 1,
	CU_MEM_ATTACH_HOST = 2,
	CU_MEM_ATTACH_SINGLE = 4
} CUmemAttach_flags;

typedef enum CUmem_advise_enum {
	CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
	CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
	CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
	CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
	CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
	CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6
} CUmem_advise;

typedef enum CUmem_range_attribute_enum {
	CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
	CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
	CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
	CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
	CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE = 5,
	CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID = 6,
	CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE = 7,
	CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID = 8
} CUmem_range_attribute;

typedef enum CUpointer_attribute_enum {
	CU_POINTER_ATTRIBUTE_CONTEXT = 1,
	CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
	CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
	CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
	CU_POINTER_ATTRIBUTE_P2P_TOKENS = 5,
	CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
	CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
	CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
	CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
	CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
	CU_POINTER_ATTRIBUTE_MAPPED = 13,
	CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
	CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
	CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
	CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
	CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
	CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,
	CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID = 20
} CUpointer_attribute;

typedef struct CUDA_MEMCPY2D_st {
	size_t srcXInBytes;
	size_t srcY;
	CUmemorytype srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	CUarray srcArray;
	size_t srcPitch;
	size_t dstXInBytes;
	size_t dstY;
	CUmemorytype dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	CUarray dstArray;
	size_t dstPitch;
	size_t WidthInBytes;
	size_t Height;
} CUDA_MEMCPY2D;

typedef struct CUDA_MEMCPY3D_st {
	size_t srcXInBytes;
	size_t srcY;
	size_t srcZ;
	size_t srcLOD;
	CUmemorytype srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	CUarray srcArray;
	void *reserved0;
	size_t srcPitch;
	size_t srcHeight;
	size_t dstXInBytes;
	size_t dstY;
	size_t dstZ;
	size_t dstLOD;
	CUmemorytype dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	CUarray dstArray;
	void *reserved1;
	size_t dstPitch;
	size_t dstHeight;
	size_t WidthInBytes;
	size_t Height;
	size_t Depth;
} CUDA_MEMCPY3D;

typedef struct CUDA_MEMCPY3D_PEER_st {
	size_t srcXInBytes;
	size_t srcY;
	size_t srcZ;
	size_t srcLOD;
	CUmemorytype srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	CUarray srcArray;
	CUcontext srcContext;
	size_t srcPitch;
	size_t srcHeight;
	size_t dstXInBytes;
	size_t dstY;
	size_t dstZ;
	size_t dstLOD;
	CUmemorytype dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	CUarray dstArray;
	CUcontext dstContext;
	size_t dstPitch;
	size_t dstHeight;
	size_t WidthInBytes;
	size_t Height;
	size_t Depth;
} CUDA_MEMCPY3D_PEER;

/* ---- arrays ---------------------------------------------------------------------------------------------------------- */

typedef enum CUaddress_mode_enum {
	CU_TR_ADDRESS_MODE_WRAP = 0,
	CU_TR_ADDRESS_MODE_CLAMP = 1,
	CU_TR_ADDRESS_MODE_MIRROR = 2,
	CU_TR_ADDRESS_MODE_BORDER = 3,
} CUaddress_mode;

typedef enum CUfilter_mode_enum {
	CU_TR_FILTER_MODE_POINT = 0,
	CU_TR_FILTER_MODE_LINEAR = 1,
} CUfilter_mode;

#define CU_TRSA_OVERRIDE_FORMAT 0x01
#define CU_PARAM_TR_DEFAULT     (-1)

typedef enum CUarray_format_enum {
	CU_AD_FORMAT_UNSIGNED_INT8 = 0x01,
	CU_AD_FORMAT_UNSIGNED_INT16 = 0x02,
	CU_AD_FORMAT_UNSIGNED_INT32 = 0x03,
	CU_AD_FORMAT_SIGNED_INT8 = 0x08,
	CU_AD_FORMAT_SIGNED_INT16 = 0x09,
	CU_AD_FORMAT_SIGNED_INT32 = 0x0a,
	CU_AD_FORMAT_HALF = 0x10,
	CU_AD_FORMAT_FLOAT = 0x20,
	CU_AD_FORMAT_UNORM_INT_101010_2 = 0x50,
	CU_AD_FORMAT_UINT8_PACKED_422 = 0x51,
	CU_AD_FORMAT_UINT8_PACKED_444 = 0x52,
	CU_AD_FORMAT_UINT8_SEMIPLANAR_420 = 0x53,
	CU_AD_FORMAT_UINT8_SEMIPLANAR_422 = 0x55,
	CU_AD_FORMAT_UINT8_SEMIPLANAR_444 = 0x57,
	CU_AD_FORMAT_UINT8_PLANAR_420 = 0x59,
	CU_AD_FORMAT_UINT8_PLANAR_422 = 0x5b,
	CU_AD_FORMAT_UINT8_PLANAR_444 = 0x5d,
	CU_AD_FORMAT_BC1_UNORM = 0x91, /* the other block-compressed formats follow it */
	CU_AD_FORMAT_BC7_UNORM_SRGB = 0x9e,
	CU_AD_FORMAT_NV16 = 0xa2,
	CU_AD_FORMAT_YUY2 = 0xa5,
	CU_AD_FORMAT_AYUV = 0xa8,
	CU_AD_FORMAT_NV12 = 0xb0,
	CU_AD_FORMAT_Y444_PLANAR8 = 0xb2,
	CU_AD_FORMAT_YUV444_8bit_SemiPlanar = 0xb4,
	CU_AD_FORMAT_UNORM_INT8X1 = 0xc0,
	CU_AD_FORMAT_UNORM_INT8X2 = 0xc1,
	CU_AD_FORMAT_UNORM_INT8X4 = 0xc2,
	CU_AD_FORMAT_UNORM_INT16X1 = 0xc3,
	CU_AD_FORMAT_UNORM_INT16X2 = 0xc4,
	CU_AD_FORMAT_UNORM_INT16X4 = 0xc5,
	CU_AD_FORMAT_SNORM_INT8X1 = 0xc6,
	CU_AD_FORMAT_SNORM_INT8X2 = 0xc7,
	CU_AD_FORMAT_SNORM_INT8X4 = 0xc8,
	CU_AD_FORMAT_SNORM_INT16X1 = 0xc9,
	CU_AD_FORMAT_SNORM_INT16X2 = 0xca,
	CU_AD_FORMAT_SNORM_INT16X4 = 0xcb
} CUarray_format;

#define CUDA_ARRAY3D_LAYERED 0x01
#define CUDA_ARRAY3D_SURFACE_LDST 0x02
#define CUDA_ARRAY3D_CUBEMAP 0x04
#define CUDA_ARRAY3D_TEXTURE_GATHER 0x08
#define CUDA_ARRAY3D_SPARSE 0x40
#define CUDA_ARRAY3D_DEFERRED_MAPPING 0x80

typedef struct CUDA_ARRAY_DESCRIPTOR_st {
	size_t Width;
	size_t Height;
	CUarray_format Format;
	unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct CUDA_ARRAY3D_DESCRIPTOR_st {
	size_t Width;
	size_t Height;
	size_t Depth;
	CUarray_format Format;
	unsigned int NumChannels;
	unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

/* Descriptors of the entry points without suffix, with sizes of 32 bits. */
typedef struct CUDA_ARRAY_DESCRIPTOR_v1_st {
	unsigned int Width;
	unsigned int Height;
	CUarray_format Format;
	unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR_v1;

typedef struct CUDA_ARRAY3D_DESCRIPTOR_v1_st {
	unsigned int Width;
	unsigned int Height;
	unsigned int Depth;
	CUarray_format Format;
	unsigned int NumChannels;
	unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR_v1;

typedef struct CUDA_ARRAY_MEMORY_REQUIREMENTS_st {
	size_t size;
	size_t alignment;
	unsigned int reserved[4];
} CUDA_ARRAY_MEMORY_REQUIREMENTS;

/* ---- virtual memory management and pools ----------------------------------------------------------------------------- */

typedef enum CUmemAllocationHandleType_enum {
	CU_MEM_HANDLE_TYPE_NONE = 0,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_MEM_HANDLE_TYPE_WIN32 = 2,
	CU_MEM_HANDLE_TYPE_WIN32_KMT = 4,
	CU_MEM_HANDLE_TYPE_FABRIC = 8
} CUmemAllocationHandleType;

typedef enum CUmemAllocationType_enum {
	CU_MEM_ALLOCATION_TYPE_INVALID = 0,
	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
	CU_MEM_ALLOCATION_TYPE_MANAGED = 2
} CUmemAllocationType;

typedef enum CUmemLocationType_enum {
	CU_MEM_LOCATION_TYPE_INVALID = 0, /* and NONE: a managed pool without a preferred location */
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_LOCATION_TYPE_HOST = 2,
	CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
	CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4,
	CU_MEM_LOCATION_TYPE_INVISIBLE = 5,
	CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN = 6 /* id: the device in the low byte, the domain in the next one */
} CUmemLocationType;

typedef enum CUmemAccess_flags_enum {
	CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
	CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
} CUmemAccess_flags;

typedef enum CUmemAllocationGranularity_flags_enum {
	CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
	CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
} CUmemAllocationGranularity_flags;

typedef enum CUmemRangeHandleType_enum { CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1 } CUmemRangeHandleType;

typedef struct CUmemLocation_st {
	CUmemLocationType type;
	int id;
} CUmemLocation;

typedef enum CUmemcpySrcAccessOrder_enum {
	CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
	CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL = 2,
	CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3
} CUmemcpySrcAccessOrder;

typedef struct CUmemcpyAttributes_st {
	CUmemcpySrcAccessOrder srcAccessOrder;
	CUmemLocation srcLocHint;
	CUmemLocation dstLocHint;
	unsigned int flags;
} CUmemcpyAttributes;

typedef struct CUmemAllocationProp_st {
	CUmemAllocationType type;
	CUmemAllocationHandleType requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc_st {
	CUmemLocation location;
	CUmemAccess_flags flags;
} CUmemAccessDesc;

typedef enum CUmemPool_attribute_enum {
	CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
	CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
	CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
	CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
	CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
	CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
	CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
	CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8
} CUmemPool_attribute;

typedef struct CUmemPoolProps_st {
	CUmemAllocationType allocType;
	CUmemAllocationHandleType handleTypes;
	CUmemLocation location;
	void *win32SecurityAttributes;
	size_t maxSize;
	unsigned short usage;
	unsigned char reserved[54];
} CUmemPoolProps;

typedef struct CUmemPoolPtrExportData_st { unsigned char reserved[64]; } CUmemPoolPtrExportData;

typedef struct CUmulticastObjectProp_st {
	unsigned int numDevices;
	size_t size;
	unsigned long long handleTypes;
	unsigned long long flags;
} CUmulticastObjectProp;

typedef enum CUmulticastGranularity_flags_enum {
	CU_MULTICAST_GRANULARITY_MINIMUM = 0,
	CU_MULTICAST_GRANULARITY_RECOMMENDED = 1
} CUmulticastGranularity_flags;

/* ---- modules and functions ------------------------------------------------------------------------------------------- */

typedef enum CUjit_option_enum {
	CU_JIT_MAX_REGISTERS = 0,
	CU_JIT_WALL_TIME = 2,
	CU_JIT_INFO_LOG_BUFFER = 3,
	CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES = 4,
	CU_JIT_ERROR_LOG_BUFFER = 5,
	CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6
} CUjit_option;
typedef enum CUlibraryOption_enum {
	CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE = 0,
	CU_LIBRARY_BINARY_IS_PRESERVED = 1
} CUlibraryOption;

typedef enum CUfunction_attribute_enum {
	CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
	CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
	CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2,
	CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
	CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
	CU_FUNC_ATTRIBUTE_PTX_VERSION = 5,
	CU_FUNC_ATTRIBUTE_BINARY_VERSION = 6,
	CU_FUNC_ATTRIBUTE_CACHE_MODE_CA = 7,
	CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
	CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
	CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET = 10,
	CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH = 11,
	CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT = 12,
	CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH = 13,
	CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
	CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 15
} CUfunction_attribute;

typedef enum CUmoduleLoadingMode_enum { CU_MODULE_EAGER_LOADING = 1, CU_MODULE_LAZY_LOADING = 2 } CUmoduleLoadingMode;
typedef enum CUfunctionLoadingState_enum {
	CU_FUNCTION_LOADING_STATE_UNLOADED = 0,
	CU_FUNCTION_LOADING_STATE_LOADED = 1
} CUfunctionLoadingState;

typedef enum CUjitInputType_enum {
	CU_JIT_INPUT_CUBIN = 0,
	CU_JIT_INPUT_PTX = 1,
	CU_JIT_INPUT_FATBINARY = 2,
	CU_JIT_INPUT_OBJECT = 3,
	CU_JIT_INPUT_LIBRARY = 4,
	CU_JIT_INPUT_NVVM = 5
} CUjitInputType;

/* ---- tensor maps ------------------------------------------------------------------------------------------------------ */

typedef struct CUtensorMap_st {
	_Alignas(128) cuuint64_t opaque[16];
} CUtensorMap;

typedef enum CUtensorMapDataType_enum {
	CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
	CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1,
	CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2,
	CU_TENSOR_MAP_DATA_TYPE_INT32 = 3,
	CU_TENSOR_MAP_DATA_TYPE_UINT64 = 4,
	CU_TENSOR_MAP_DATA_TYPE_INT64 = 5,
	CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
	CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
	CU_TENSOR_MAP_DATA_TYPE_FLOAT64 = 8,
	CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
	CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ = 10,
	CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 = 11,
	CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ = 12,
	CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B = 13,
	CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B = 14,
	CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B = 15
} CUtensorMapDataType;
typedef enum CUtensorMapInterleave_enum {
	CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
	CU_TENSOR_MAP_INTERLEAVE_16B = 1,
	CU_TENSOR_MAP_INTERLEAVE_32B = 2
} CUtensorMapInterleave;
typedef enum CUtensorMapSwizzle_enum {
	CU_TENSOR_MAP_SWIZZLE_NONE = 0,
	CU_TENSOR_MAP_SWIZZLE_32B = 1,
	CU_TENSOR_MAP_SWIZZLE_64B = 2,
	CU_TENSOR_MAP_SWIZZLE_128B = 3,
	CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B = 4,
	CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B_FLIP_8B = 5,
	CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B = 6
} CUtensorMapSwizzle;
typedef enum CUtensorMapL2promotion_enum {
	CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
	CU_TENSOR_MAP_L2_PROMOTION_L2_64B = 1,
	CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
	CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
} CUtensorMapL2promotion;
typedef enum CUtensorMapFloatOOBfill_enum {
	CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
	CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA = 1
} CUtensorMapFloatOOBfill;

/* ---- streams, events, launches --------------------------------------------------------------------------------------- */

typedef enum CUstream_flags_enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 } CUstream_flags;
typedef enum CUevent_flags_enum {
	CU_EVENT_DEFAULT = 0,
	CU_EVENT_BLOCKING_SYNC = 1,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_EVENT_INTERPROCESS = 4
} CUevent_flags;
typedef enum CUstreamCaptureStatus_enum {
	CU_STREAM_CAPTURE_STATUS_NONE = 0,
	CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
	CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;
typedef enum CUstreamCaptureMode_enum {
	CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
	CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
	CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;

typedef CUresult (*CUgraphRecaptureCallback)(void *, CUgraphNode, const void *, const void *, int);
typedef struct CUstreamCigCaptureParams_st CUstreamCigCaptureParams;
typedef enum CUstreamUpdateCaptureDependencies_flags_enum {
	CU_STREAM_ADD_CAPTURE_DEPENDENCIES = 0,
	CU_STREAM_SET_CAPTURE_DEPENDENCIES = 1
} CUstreamUpdateCaptureDependencies_flags;

typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *user_data);

typedef enum CUlaunchAttributeID_enum {
	CU_LAUNCH_ATTRIBUTE_IGNORE = 0,
	CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW = 1,
	CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
	CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY = 3,
	CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
	CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 5,
	CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
	CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT = 7,
	CU_LAUNCH_ATTRIBUTE_PRIORITY = 8
} CUlaunchAttributeID;

typedef union CUlaunchAttributeValue_union {
	char pad[64];
	int cooperative;
	int priority;
	int syncPolicy;
	struct { unsigned int x, y, z; } clusterDim;
	struct { void *base_ptr; size_t num_bytes; float hitRatio; int hitProp; int missProp; } accessPolicyWindow;
} CUlaunchAttributeValue;
typedef CUlaunchAttributeID CUstreamAttrID;
typedef CUlaunchAttributeID CUkernelNodeAttrID;
typedef CUlaunchAttributeValue CUstreamAttrValue;
typedef CUlaunchAttributeValue CUkernelNodeAttrValue;

typedef struct CUlaunchAttribute_st {
	CUlaunchAttributeID id;
	char pad[4];
	CUlaunchAttributeValue value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig_st {
	unsigned int gridDimX, gridDimY, gridDimZ;
	unsigned int blockDimX, blockDimY, blockDimZ;
	unsigned int sharedMemBytes;
	CUstream hStream;
	CUlaunchAttribute *attrs;
	unsigned int numAttrs;
} CUlaunchConfig;

typedef struct CUDA_LAUNCH_PARAMS_st {
	CUfunction function;
	unsigned int gridDimX, gridDimY, gridDimZ;
	unsigned int blockDimX, blockDimY, blockDimZ;
	unsigned int sharedMemBytes;
	CUstream hStream;
	void **kernelParams;
} CUDA_LAUNCH_PARAMS;

#define CU_LAUNCH_PARAM_END ((void *)0x00)
#define CU_LAUNCH_PARAM_BUFFER_POINTER ((void *)0x01)
#define CU_LAUNCH_PARAM_BUFFER_SIZE ((void *)0x02)

/* ---- graphs ---------------------------------------------------------------------------------------------------------- */

typedef enum CUgraphNodeType_enum {
	CU_GRAPH_NODE_TYPE_KERNEL = 0,
	CU_GRAPH_NODE_TYPE_MEMCPY = 1,
	CU_GRAPH_NODE_TYPE_MEMSET = 2,
	CU_GRAPH_NODE_TYPE_HOST = 3,
	CU_GRAPH_NODE_TYPE_GRAPH = 4,
	CU_GRAPH_NODE_TYPE_EMPTY = 5,
	CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6,
	CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7,
	CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL = 8,
	CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT = 9,
	CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10,
	CU_GRAPH_NODE_TYPE_MEM_FREE = 11,
	CU_GRAPH_NODE_TYPE_BATCH_MEM_OP = 12,
	CU_GRAPH_NODE_TYPE_CONDITIONAL = 13
} CUgraphNodeType;

typedef enum CUgraphMem_attribute_enum {
	CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT = 0,
	CU_GRAPH_MEM_ATTR_USED_MEM_HIGH = 1,
	CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT = 2,
	CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH = 3
} CUgraphMem_attribute;

typedef enum CUgraphInstantiateResult_enum {
	CUDA_GRAPH_INSTANTIATE_SUCCESS = 0,
	CUDA_GRAPH_INSTANTIATE_ERROR = 1,
	CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE = 2,
	CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED = 3
} CUgraphInstantiateResult;

#define CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH 1
#define CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD 2
#define CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH 4
#define CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY 8

typedef enum CUgraphExecUpdateResult_enum {
	CU_GRAPH_EXEC_UPDATE_SUCCESS = 0,
	CU_GRAPH_EXEC_UPDATE_ERROR = 1,
	CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED = 2,
	CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED = 3,
	CU_GRAPH_EXEC_UPDATE_ERROR_FUNCTION_CHANGED = 4,
	CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED = 5,
	CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED = 6
} CUgraphExecUpdateResult;

typedef struct CUgraphExecUpdateResultInfo_st {
	CUgraphExecUpdateResult result;
	CUgraphNode errorNode;
	CUgraphNode errorFromNode;
} CUgraphExecUpdateResultInfo;

typedef struct CUgraphEdgeData_st {
	unsigned char from_port;
	unsigned char to_port;
	unsigned char type;
	unsigned char reserved[5];
} CUgraphEdgeData;

typedef struct CUDA_GRAPH_INSTANTIATE_PARAMS_st {
	cuuint64_t flags;
	CUstream hUploadStream;
	CUgraphNode hErrNode_out;
	CUgraphInstantiateResult result_out;
} CUDA_GRAPH_INSTANTIATE_PARAMS;

/* The v1 form lacks the last two fields; the node-parameter union uses the long form. */
typedef struct CUDA_KERNEL_NODE_PARAMS_v1_st {
	CUfunction func;
	unsigned int gridDimX, gridDimY, gridDimZ;
	unsigned int blockDimX, blockDimY, blockDimZ;
	unsigned int sharedMemBytes;
	void **kernelParams;
	void **extra;
} CUDA_KERNEL_NODE_PARAMS_v1;

typedef struct CUDA_KERNEL_NODE_PARAMS_st {
	CUfunction func;
	unsigned int gridDimX, gridDimY, gridDimZ;
	unsigned int blockDimX, blockDimY, blockDimZ;
	unsigned int sharedMemBytes;
	void **kernelParams;
	void **extra;
	CUkernel kern;
	CUcontext ctx;
} CUDA_KERNEL_NODE_PARAMS;

typedef struct CUDA_MEMSET_NODE_PARAMS_st {
	CUdeviceptr dst;
	size_t pitch;
	unsigned int value;
	unsigned int elementSize;
	size_t width;
	size_t height;
} CUDA_MEMSET_NODE_PARAMS;

typedef struct CUDA_MEMSET_NODE_PARAMS_v2_st {
	CUdeviceptr dst;
	size_t pitch;
	unsigned int value;
	unsigned int elementSize;
	size_t width;
	size_t height;
	CUcontext ctx;
} CUDA_MEMSET_NODE_PARAMS_v2;

typedef struct CUDA_MEMCPY_NODE_PARAMS_st {
	int flags;
	int reserved;
	CUcontext copyCtx;
	CUDA_MEMCPY3D copyParams;
} CUDA_MEMCPY_NODE_PARAMS;

typedef struct CUDA_HOST_NODE_PARAMS_st {
	CUhostFn fn;
	void *userData;
} CUDA_HOST_NODE_PARAMS;

typedef struct CUDA_MEM_ALLOC_NODE_PARAMS_st {
	CUmemPoolProps poolProps;
	const CUmemAccessDesc *accessDescs;
	size_t accessDescCount;
	size_t bytesize;
	CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;

typedef struct CUDA_MEM_FREE_NODE_PARAMS_st { CUdeviceptr dptr; } CUDA_MEM_FREE_NODE_PARAMS;

#define CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE 1

typedef struct CUDA_CHILD_GRAPH_NODE_PARAMS_st {
	CUgraph graph;
	int ownership;
} CUDA_CHILD_GRAPH_NODE_PARAMS;

typedef struct CUDA_EVENT_NODE_PARAMS_st { CUevent event; } CUDA_EVENT_NODE_PARAMS;

#define CU_USER_OBJECT_NO_DESTRUCTOR_SYNC 1
#define CU_GRAPH_USER_OBJECT_MOVE 1

/* stream memory operations: a stream writes a word of memory, or waits until one has a value */
typedef enum CUstreamWaitValue_flags_enum {
	CU_STREAM_WAIT_VALUE_GEQ = 0,
	CU_STREAM_WAIT_VALUE_EQ = 1,
	CU_STREAM_WAIT_VALUE_AND = 2,
	CU_STREAM_WAIT_VALUE_NOR = 3,
	CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30
} CUstreamWaitValue_flags;

typedef enum CUstreamWriteValue_flags_enum {
	CU_STREAM_WRITE_VALUE_DEFAULT = 0,
	CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1
} CUstreamWriteValue_flags;

typedef enum CUstreamMemoryBarrier_flags_enum {
	CU_STREAM_MEMORY_BARRIER_TYPE_SYS = 0,
	CU_STREAM_MEMORY_BARRIER_TYPE_GPU = 1
} CUstreamMemoryBarrier_flags;

typedef enum CUstreamBatchMemOpType_enum {
	CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
	CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2,
	CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES = 3,
	CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
	CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5,
	CU_STREAM_MEM_OP_BARRIER = 6
} CUstreamBatchMemOpType;

typedef union CUstreamBatchMemOpParams_union {
	CUstreamBatchMemOpType operation;
	struct {
		CUstreamBatchMemOpType operation;
		CUdeviceptr address;
		union {
			cuuint32_t value;
			cuuint64_t value64;
		};
		unsigned int flags;
		CUdeviceptr alias;
	} waitValue;
	struct {
		CUstreamBatchMemOpType operation;
		CUdeviceptr address;
		union {
			cuuint32_t value;
			cuuint64_t value64;
		};
		unsigned int flags;
		CUdeviceptr alias;
	} writeValue;
	struct {
		CUstreamBatchMemOpType operation;
		unsigned int flags;
	} flushRemoteWrites;
	struct {
		CUstreamBatchMemOpType operation;
		unsigned int flags;
	} memoryBarrier;
	cuuint64_t pad[6];
} CUstreamBatchMemOpParams;

typedef struct CUDA_BATCH_MEM_OP_NODE_PARAMS_st {
	CUcontext ctx;
	unsigned int count;
	CUstreamBatchMemOpParams *paramArray;
	unsigned int flags;
} CUDA_BATCH_MEM_OP_NODE_PARAMS;

typedef struct CUgraphNodeParams_st {
	CUgraphNodeType type;
	int reserved0[3];
	union {
		long long reserved1[29];
		CUDA_KERNEL_NODE_PARAMS kernel;
		CUDA_MEMCPY_NODE_PARAMS memcpy;
		CUDA_MEMSET_NODE_PARAMS_v2 memset;
		CUDA_HOST_NODE_PARAMS host;
		CUDA_CHILD_GRAPH_NODE_PARAMS graph;
		CUDA_EVENT_NODE_PARAMS eventWait;
		CUDA_EVENT_NODE_PARAMS eventRecord;
		CUDA_MEM_ALLOC_NODE_PARAMS alloc;
		CUDA_MEM_FREE_NODE_PARAMS free;
		CUDA_BATCH_MEM_OP_NODE_PARAMS memOp;
	};
	long long reserved2;
} CUgraphNodeParams;

/* messages of the driver */
typedef enum CUlogLevel_enum { CU_LOG_LEVEL_ERROR = 0, CU_LOG_LEVEL_WARNING = 1 } CUlogLevel;
typedef struct CUlogsCallbackEntry_st *CUlogsCallbackHandle;
typedef void (*CUlogsCallback)(void *data, CUlogLevel level, char *message, size_t length);
typedef unsigned int CUlogIterator;

/* ---- finding entry points -------------------------------------------------------------------------------------------- */

typedef enum CUdriverProcAddressQueryResult_enum {
	CU_GET_PROC_ADDRESS_SUCCESS = 0,
	CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
	CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2
} CUdriverProcAddressQueryResult;

#define CU_GET_PROC_ADDRESS_DEFAULT 0
#define CU_GET_PROC_ADDRESS_LEGACY_STREAM 1
#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2

/* ---- entry points ---------------------------------------------------------------------------------------------------- */

/* sparse arrays */
typedef enum CUresourcetype_enum { CU_RESOURCE_TYPE_ARRAY = 0, CU_RESOURCE_TYPE_MIPMAPPED_ARRAY = 1 } CUresourcetype;
typedef enum CUmemOperationType_enum { CU_MEM_OPERATION_TYPE_MAP = 1, CU_MEM_OPERATION_TYPE_UNMAP = 2 } CUmemOperationType;

typedef struct CUarrayMapInfo_st {
	CUresourcetype resourceType;
	union { CUmipmappedArray mipmap; CUarray array; } resource;
	int subresourceType;
	union {
		struct { unsigned int level, layer, offsetX, offsetY, offsetZ, extentWidth, extentHeight, extentDepth; } sparseLevel;
		struct { unsigned int layer; unsigned long long offset, size; } miptail;
	} subresource;
	CUmemOperationType memOperationType;
	int memHandleType;
	union { CUmemGenericAllocationHandle memHandle; } memHandle;
	unsigned long long offset;
	unsigned int deviceBitMask;
	unsigned int flags;
	unsigned int reserved[2];
} CUarrayMapInfo;

/* checkpoints */
typedef struct CUcheckpointGpuPair_st { CUuuid oldUuid, newUuid; } CUcheckpointGpuPair;
typedef struct CUcheckpointRestoreArgs_st {
	CUcheckpointGpuPair *gpuPairs;
	unsigned int gpuPairsCount;
	unsigned int padding0;
	void **customStorageInfo_out;
	char reserved[40];
} CUcheckpointRestoreArgs;

#pragma GCC visibility push(default)

#define CU_FN(name, ...) CUresult name(__VA_ARGS__)
#define CU_FN_PTSZ(name, ...) CUresult name(__VA_ARGS__); CUresult name##_ptsz(__VA_ARGS__)
#define CU_FN_PTDS(name, ...) CUresult name(__VA_ARGS__); CUresult name##_ptds(__VA_ARGS__)

/* errors, start, lookup */
CU_FN(cuGetErrorString, CUresult, const char **);
CU_FN(cuGetErrorName, CUresult, const char **);
CU_FN(cuInit, unsigned int);
CU_FN(cuDriverGetVersion, int *);
CU_FN(cuGetExportTable, const void **, const CUuuid *);
CU_FN(cuGetProcAddress, const char *, void **, int, cuuint64_t);
CU_FN(cuGetProcAddress_v2, const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
CU_FN(cuGetProcAddress_v2_ptsz, const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
CU_FN(cuProfilerInitialize, const char *, const char *, int);
CU_FN(cuProfilerStart, void);
CU_FN(cuProfilerStop, void);

/* devices */
CU_FN(cuDeviceGet, CUdevice *, int);
CU_FN(cuDeviceGetCount, int *);
CU_FN(cuDeviceGetName, char *, int, CUdevice);
CU_FN(cuDeviceGetUuid, CUuuid *, CUdevice);
CU_FN(cuDeviceGetUuid_v2, CUuuid *, CUdevice);
CU_FN(cuDeviceGetLuid, char *, unsigned int *, CUdevice);
CU_FN(cuDeviceTotalMem, unsigned int *, CUdevice);
CU_FN(cuDeviceTotalMem_v2, size_t *, CUdevice);
CU_FN(cuDeviceGetAttribute, int *, CUdevice_attribute, CUdevice);
CU_FN(cuDeviceGetProperties, CUdevprop *, CUdevice);
CU_FN(cuDeviceComputeCapability, int *, int *, CUdevice);
CU_FN(cuDeviceGetByPCIBusId, CUdevice *, const char *);
CU_FN(cuDeviceGetPCIBusId, char *, int, CUdevice);
CU_FN(cuDeviceGetTexture1DLinearMaxWidth, size_t *, CUarray_format, unsigned, CUdevice);
CU_FN(cuDeviceGetExecAffinitySupport, int *, CUexecAffinityType, CUdevice);
CU_FN(cuDeviceCanAccessPeer, int *, CUdevice, CUdevice);
CU_FN(cuDeviceGetP2PAttribute, int *, CUdevice_P2PAttribute, CUdevice, CUdevice);
CU_FN(cuDevicePrimaryCtxRetain, CUcontext *, CUdevice);
CU_FN(cuDevicePrimaryCtxRelease, CUdevice);
CU_FN(cuDevicePrimaryCtxRelease_v2, CUdevice);
CU_FN(cuDevicePrimaryCtxReset, CUdevice);
CU_FN(cuDevicePrimaryCtxReset_v2, CUdevice);
CU_FN(cuDevicePrimaryCtxSetFlags, CUdevice, unsigned int);
CU_FN(cuDevicePrimaryCtxSetFlags_v2, CUdevice, unsigned int);
CU_FN(cuDevicePrimaryCtxGetState, CUdevice, unsigned int *, int *);
CU_FN(cuDeviceGetDefaultMemPool, CUmemoryPool *, CUdevice);
CU_FN(cuDeviceGetMemPool, CUmemoryPool *, CUdevice);
CU_FN(cuDeviceSetMemPool, CUdevice, CUmemoryPool);
CU_FN(cuDeviceGetGraphMemAttribute, CUdevice, CUgraphMem_attribute, void *);
CU_FN(cuDeviceSetGraphMemAttribute, CUdevice, CUgraphMem_attribute, void *);
CU_FN(cuDeviceGraphMemTrim, CUdevice);
CU_FN(cuFlushGPUDirectRDMAWrites, int, int);

/* contexts */
CU_FN(cuCtxCreate, CUcontext *, unsigned int, CUdevice);
CU_FN(cuCtxCreate_v2, CUcontext *, unsigned int, CUdevice);
CU_FN(cuCtxCreate_v3, CUcontext *, CUexecAffinityParam *, int, unsigned int, CUdevice);
CU_FN(cuCtxCreate_v4, CUcontext *, CUctxCreateParams *, unsigned int, CUdevice);
CU_FN(cuCtxDestroy, CUcontext);
CU_FN(cuCtxDestroy_v2, CUcontext);
CU_FN(cuCtxAttach, CUcontext *, unsigned int);
CU_FN(cuCtxDetach, CUcontext);
CU_FN(cuCtxPushCurrent, CUcontext);
CU_FN(cuCtxPushCurrent_v2, CUcontext);
CU_FN(cuCtxPopCurrent, CUcontext *);
CU_FN(cuCtxPopCurrent_v2, CUcontext *);
CU_FN(cuCtxSetCurrent, CUcontext);
CU_FN(cuCtxGetCurrent, CUcontext *);
CU_FN(cuCtxGetDevice, CUdevice *);
CU_FN(cuCtxGetDevice_v2, CUdevice *, CUcontext);
CU_FN(cuCtxGetFlags, unsigned int *);
CU_FN(cuCtxSetFlags, unsigned int);
CU_FN(cuCtxGetId, CUcontext, unsigned long long *);
CU_FN(cuCtxSynchronize, void);
CU_FN(cuCtxSynchronize_v2, CUcontext);
CU_FN(cuCtxSetLimit, CUlimit, size_t);
CU_FN(cuCtxGetLimit, size_t *, CUlimit);
CU_FN(cuCtxGetCacheConfig, CUfunc_cache *);
CU_FN(cuCtxSetCacheConfig, CUfunc_cache);
CU_FN(cuCtxGetSharedMemConfig, CUsharedconfig *);
CU_FN(cuCtxSetSharedMemConfig, CUsharedconfig);
CU_FN(cuCtxGetApiVersion, CUcontext, unsigned int *);
CU_FN(cuCtxGetStreamPriorityRange, int *, int *);
CU_FN(cuCtxResetPersistingL2Cache, void);
CU_FN(cuCtxGetExecAffinity, CUexecAffinityParam *, CUexecAffinityType);
CU_FN(cuCtxRecordEvent, CUcontext, CUevent);
CU_FN(cuCtxWaitEvent, CUcontext, CUevent);
CU_FN(cuCtxEnablePeerAccess, CUcontext, unsigned int);
CU_FN(cuCtxDisablePeerAccess, CUcontext);
CU_FN(cuGLCtxCreate, CUcontext *, unsigned int, CUdevice);
CU_FN(cuGLCtxCreate_v2, CUcontext *, unsigned int, CUdevice);
CU_FN(cuVDPAUCtxCreate, CUcontext *, unsigned int, CUdevice, unsigned int, void *);
CU_FN(cuVDPAUCtxCreate_v2, CUcontext *, unsigned int, CUdevice, unsigned int, void *);
CU_FN(cuCheckpointProcessRestore, int, CUcheckpointRestoreArgs *);
CU_FN(cuGreenCtxCreate, CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned int);
CU_FN(cuGreenCtxDestroy, CUgreenCtx);
CU_FN(cuCtxFromGreenCtx, CUcontext *, CUgreenCtx);

/* linear memory */
CU_FN(cuMemGetInfo, unsigned int *, unsigned int *);
CU_FN(cuMemGetInfo_v2, size_t *, size_t *);
CU_FN(cuMemAlloc, CUdeviceptr_v1 *, unsigned int);
CU_FN(cuMemAlloc_v2, CUdeviceptr *, size_t);
CU_FN(cuMemAllocPitch, CUdeviceptr_v1 *, unsigned int *, unsigned int, unsigned int, unsigned int);
CU_FN(cuMemAllocPitch_v2, CUdeviceptr *, size_t *, size_t, size_t, unsigned int);
CU_FN(cuMemFree, CUdeviceptr_v1);
CU_FN(cuMemFree_v2, CUdeviceptr);
CU_FN(cuMemGetAddressRange, CUdeviceptr_v1 *, unsigned int *, CUdeviceptr_v1);
CU_FN(cuMemGetAddressRange_v2, CUdeviceptr *, size_t *, CUdeviceptr);
CU_FN(cuMemAllocHost, void **, unsigned int);
CU_FN(cuMemAllocHost_v2, void **, size_t);
CU_FN(cuMemFreeHost, void *);
CU_FN(cuMemHostAlloc, void **, size_t, unsigned int);
CU_FN(cuMemHostGetDevicePointer, CUdeviceptr_v1 *, void *, unsigned int);
CU_FN(cuMemHostGetDevicePointer_v2, CUdeviceptr *, void *, unsigned int);
CU_FN(cuMemHostGetFlags, unsigned int *, void *);
CU_FN(cuMemHostRegister, void *, size_t, unsigned int);
CU_FN(cuMemHostRegister_v2, void *, size_t, unsigned int);
CU_FN(cuMemHostUnregister, void *);
CU_FN(cuMemAllocManaged, CUdeviceptr *, size_t, unsigned int);
CU_FN(cuMemAdvise, CUdeviceptr, size_t, CUmem_advise, CUdevice);
CU_FN(cuMemAdvise_v2, CUdeviceptr, size_t, CUmem_advise, CUmemLocation);
CU_FN_PTSZ(cuMemPrefetchAsync, CUdeviceptr, size_t, CUdevice, CUstream);
CU_FN_PTSZ(cuMemPrefetchAsync_v2, CUdeviceptr, size_t, CUmemLocation, unsigned int, CUstream);
CU_FN_PTSZ(cuMemPrefetchBatchAsync, CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream);
CU_FN_PTSZ(cuMemDiscardAndPrefetchBatchAsync, CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long,
	   CUstream);
CU_FN(cuMemRangeGetAttribute, void *, size_t, CUmem_range_attribute, CUdeviceptr, size_t);
CU_FN(cuMemRangeGetAttributes, void **, size_t *, CUmem_range_attribute *, size_t, CUdeviceptr, size_t);
CU_FN(cuPointerGetAttribute, void *, CUpointer_attribute, CUdeviceptr);
CU_FN(cuPointerGetAttributes, unsigned int, CUpointer_attribute *, void **, CUdeviceptr);
CU_FN(cuPointerSetAttribute, const void *, CUpointer_attribute, CUdeviceptr);
CU_FN(cuIpcGetMemHandle, CUipcMemHandle *, CUdeviceptr);
CU_FN(cuIpcOpenMemHandle, CUdeviceptr *, CUipcMemHandle, unsigned int);
CU_FN(cuIpcOpenMemHandle_v2, CUdeviceptr *, CUipcMemHandle, unsigned int);
CU_FN(cuIpcCloseMemHandle, CUdeviceptr);
CU_FN(cuIpcGetEventHandle, CUipcEventHandle *, CUevent);
CU_FN(cuIpcOpenEventHandle, CUevent *, CUipcEventHandle);

/* copies and fills */
CU_FN_PTSZ(cuMemcpyBatchAsync, CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, size_t *, CUstream);
CU_FN_PTSZ(cuMemcpyBatchAsync_v2, CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, CUstream);
CU_FN_PTSZ(cuMemcpyWithAttributesAsync, CUdeviceptr, CUdeviceptr, size_t, CUmemcpyAttributes *, CUstream);
CU_FN_PTDS(cuMemcpy, CUdeviceptr, CUdeviceptr, size_t);
CU_FN_PTSZ(cuMemcpyAsync, CUdeviceptr, CUdeviceptr, size_t, CUstream);
CU_FN_PTDS(cuMemcpyPeer, CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t);
CU_FN_PTSZ(cuMemcpyPeerAsync, CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream);
CU_FN(cuMemcpyHtoD, CUdeviceptr_v1, const void *, unsigned int);
CU_FN(cuMemcpyDtoH, void *, CUdeviceptr_v1, unsigned int);
CU_FN(cuMemcpyDtoD, CUdeviceptr_v1, CUdeviceptr_v1, unsigned int);
CU_FN(cuMemcpyHtoDAsync, CUdeviceptr_v1, const void *, unsigned int, CUstream);
CU_FN(cuMemcpyDtoHAsync, void *, CUdeviceptr_v1, unsigned int, CUstream);
CU_FN(cuMemcpyDtoDAsync, CUdeviceptr_v1, CUdeviceptr_v1, unsigned int, CUstream);
CU_FN_PTDS(cuMemcpyHtoD_v2, CUdeviceptr, const void *, size_t);
CU_FN_PTDS(cuMemcpyDtoH_v2, void *, CUdeviceptr, size_t);
CU_FN_PTDS(cuMemcpyDtoD_v2, CUdeviceptr, CUdeviceptr, size_t);
CU_FN_PTDS(cuMemcpyDtoA_v2, CUarray, size_t, CUdeviceptr, size_t);
CU_FN_PTDS(cuMemcpyAtoD_v2, CUdeviceptr, CUarray, size_t, size_t);
CU_FN_PTDS(cuMemcpyHtoA_v2, CUarray, size_t, const void *, size_t);
CU_FN_PTDS(cuMemcpyAtoH_v2, void *, CUarray, size_t, size_t);
CU_FN_PTDS(cuMemcpyAtoA_v2, CUarray, size_t, CUarray, size_t, size_t);
CU_FN_PTSZ(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, size_t, CUstream);
CU_FN_PTSZ(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, size_t, CUstream);
CU_FN_PTSZ(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, size_t, CUstream);
CU_FN_PTSZ(cuMemcpyHtoAAsync_v2, CUarray, size_t, const void *, size_t, CUstream);
CU_FN_PTSZ(cuMemcpyAtoHAsync_v2, void *, CUarray, size_t, size_t, CUstream);
CU_FN_PTDS(cuMemcpy2D_v2, const CUDA_MEMCPY2D *);
CU_FN_PTDS(cuMemcpy2DUnaligned_v2, const CUDA_MEMCPY2D *);
CU_FN_PTSZ(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *, CUstream);
CU_FN_PTDS(cuMemcpy3D_v2, const CUDA_MEMCPY3D *);
CU_FN_PTSZ(cuMemcpy3DAsync_v2, const CUDA_MEMCPY3D *, CUstream);
CU_FN_PTDS(cuMemcpy3DPeer, const CUDA_MEMCPY3D_PEER *);
CU_FN_PTSZ(cuMemcpy3DPeerAsync, const CUDA_MEMCPY3D_PEER *, CUstream);
CU_FN(cuMemsetD8, CUdeviceptr_v1, unsigned char, unsigned int);
CU_FN(cuMemsetD16, CUdeviceptr_v1, unsigned short, unsigned int);
CU_FN(cuMemsetD32, CUdeviceptr_v1, unsigned int, unsigned int);
CU_FN(cuMemsetD2D8, CUdeviceptr_v1, unsigned int, unsigned char, unsigned int, unsigned int);
CU_FN(cuMemsetD2D16, CUdeviceptr_v1, unsigned int, unsigned short, unsigned int, unsigned int);
CU_FN(cuMemsetD2D32, CUdeviceptr_v1, unsigned int, unsigned int, unsigned int, unsigned int);
CU_FN_PTDS(cuMemsetD8_v2, CUdeviceptr, unsigned char, size_t);
CU_FN_PTDS(cuMemsetD16_v2, CUdeviceptr, unsigned short, size_t);
CU_FN_PTDS(cuMemsetD32_v2, CUdeviceptr, unsigned int, size_t);
CU_FN_PTDS(cuMemsetD2D8_v2, CUdeviceptr, size_t, unsigned char, size_t, size_t);
CU_FN_PTDS(cuMemsetD2D16_v2, CUdeviceptr, size_t, unsigned short, size_t, size_t);
CU_FN_PTDS(cuMemsetD2D32_v2, CUdeviceptr, size_t, unsigned int, size_t, size_t);
CU_FN_PTSZ(cuMemsetD8Async, CUdeviceptr, unsigned char, size_t, CUstream);
CU_FN_PTSZ(cuMemsetD16Async, CUdeviceptr, unsigned short, size_t, CUstream);
CU_FN_PTSZ(cuMemsetD32Async, CUdeviceptr, unsigned int, size_t, CUstream);
CU_FN_PTSZ(cuMemsetD2D8Async, CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream);
CU_FN_PTSZ(cuMemsetD2D16Async, CUdeviceptr, size_t, unsigned short, size_t, size_t, CUstream);
CU_FN_PTSZ(cuMemsetD2D32Async, CUdeviceptr, size_t, unsigned int, size_t, size_t, CUstream);

/* arrays */
CU_FN(cuArrayCreate, CUarray *, const CUDA_ARRAY_DESCRIPTOR_v1 *);
CU_FN(cuArrayCreate_v2, CUarray *, const CUDA_ARRAY_DESCRIPTOR *);
CU_FN(cuArrayGetDescriptor, CUDA_ARRAY_DESCRIPTOR_v1 *, CUarray);
CU_FN(cuArrayGetDescriptor_v2, CUDA_ARRAY_DESCRIPTOR *, CUarray);
CU_FN(cuArray3DCreate, CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v1 *);
CU_FN(cuArray3DCreate_v2, CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *);
CU_FN(cuArray3DGetDescriptor, CUDA_ARRAY3D_DESCRIPTOR_v1 *, CUarray);
CU_FN(cuArray3DGetDescriptor_v2, CUDA_ARRAY3D_DESCRIPTOR *, CUarray);
CU_FN(cuArrayGetMemoryRequirements, CUDA_ARRAY_MEMORY_REQUIREMENTS *, CUarray, CUdevice);
CU_FN(cuArrayDestroy, CUarray);
CU_FN(cuMipmappedArrayCreate, CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int);
CU_FN(cuMipmappedArrayGetLevel, CUarray *, CUmipmappedArray, unsigned int);
CU_FN(cuMipmappedArrayGetMemoryRequirements, CUDA_ARRAY_MEMORY_REQUIREMENTS *, CUmipmappedArray, CUdevice);
CU_FN(cuMipmappedArrayDestroy, CUmipmappedArray);
CU_FN_PTSZ(cuMemMapArrayAsync, CUarrayMapInfo *, unsigned int, CUstream);

/* virtual memory management */
CU_FN(cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CU_FN(cuMemAddressFree, CUdeviceptr, size_t);
CU_FN(cuMemCreate, CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CU_FN(cuMemRelease, CUmemGenericAllocationHandle);
CU_FN(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CU_FN(cuMemUnmap, CUdeviceptr, size_t);
CU_FN(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
CU_FN(cuMemGetAccess, unsigned long long *, const CUmemLocation *, CUdeviceptr);
CU_FN(cuMemGetAllocationGranularity, size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
CU_FN(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *, CUmemGenericAllocationHandle);
CU_FN(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *, void *);
CU_FN(cuMemExportToShareableHandle, void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
CU_FN(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
CU_FN(cuMemGetHandleForAddressRange, void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
CU_FN(cuMulticastCreate, CUmemGenericAllocationHandle *, const CUmulticastObjectProp *);
CU_FN(cuMulticastAddDevice, CUmemGenericAllocationHandle, CUdevice);
CU_FN(cuMulticastBindMem, CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long);
CU_FN(cuMulticastBindAddr, CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
CU_FN(cuMulticastUnbind, CUmemGenericAllocationHandle, CUdevice, size_t, size_t);
CU_FN(cuMulticastGetGranularity, size_t *, const CUmulticastObjectProp *, CUmulticastGranularity_flags);

/* pools */
CU_FN_PTSZ(cuMemAllocAsync, CUdeviceptr *, size_t, CUstream);
CU_FN_PTSZ(cuMemAllocFromPoolAsync, CUdeviceptr *, size_t, CUmemoryPool, CUstream);
CU_FN_PTSZ(cuMemFreeAsync, CUdeviceptr, CUstream);
CU_FN(cuMemPoolCreate, CUmemoryPool *, const CUmemPoolProps *);
CU_FN(cuMemPoolDestroy, CUmemoryPool);
CU_FN(cuMemPoolTrimTo, CUmemoryPool, size_t);
CU_FN(cuMemPoolSetAttribute, CUmemoryPool, CUmemPool_attribute, void *);
CU_FN(cuMemPoolGetAttribute, CUmemoryPool, CUmemPool_attribute, void *);
CU_FN(cuMemPoolSetAccess, CUmemoryPool, const CUmemAccessDesc *, size_t);
CU_FN(cuMemPoolGetAccess, CUmemAccess_flags *, CUmemoryPool, CUmemLocation *);
CU_FN(cuMemPoolExportToShareableHandle, void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long);
CU_FN(cuMemPoolImportFromShareableHandle, CUmemoryPool *, void *, CUmemAllocationHandleType, unsigned long long);
CU_FN(cuMemPoolExportPointer, CUmemPoolPtrExportData *, CUdeviceptr);
CU_FN(cuMemPoolImportPointer, CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *);
CU_FN(cuMemGetDefaultMemPool, CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
CU_FN(cuMemGetMemPool, CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
CU_FN(cuMemSetMemPool, CUmemLocation *, CUmemAllocationType, CUmemoryPool);

/* modules and libraries */
CU_FN(cuModuleLoad, CUmodule *, const char *);
CU_FN(cuModuleLoadData, CUmodule *, const void *);
CU_FN(cuModuleLoadDataEx, CUmodule *, const void *, unsigned int, CUjit_option *, void **);
CU_FN(cuModuleLoadFatBinary, CUmodule *, const void *);
CU_FN(cuModuleUnload, CUmodule);
CU_FN(cuModuleGetLoadingMode, CUmoduleLoadingMode *);
CU_FN(cuModuleGetFunction, CUfunction *, CUmodule, const char *);
CU_FN(cuModuleGetFunctionCount, unsigned int *, CUmodule);
CU_FN(cuModuleEnumerateFunctions, CUfunction *, unsigned int, CUmodule);
CU_FN(cuModuleGetGlobal, CUdeviceptr_v1 *, unsigned int *, CUmodule, const char *);
CU_FN(cuModuleGetGlobal_v2, CUdeviceptr *, size_t *, CUmodule, const char *);
CU_FN(cuModuleGetTexRef, CUtexref *, CUmodule, const char *);
CU_FN(cuModuleGetSurfRef, CUsurfref *, CUmodule, const char *);
CU_FN(cuTexRefCreate, CUtexref *);
CU_FN(cuTexRefDestroy, CUtexref);
CU_FN(cuTexRefSetArray, CUtexref, CUarray, unsigned int);
CU_FN(cuTexRefGetArray, CUarray *, CUtexref);
CU_FN(cuTexRefSetAddress_v2, size_t *, CUtexref, CUdeviceptr, size_t);
CU_FN(cuTexRefSetAddress2D_v3, CUtexref, const CUDA_ARRAY_DESCRIPTOR *, CUdeviceptr, size_t);
CU_FN(cuTexRefGetAddress_v2, CUdeviceptr *, CUtexref);
CU_FN(cuTexRefSetFormat, CUtexref, CUarray_format, int);
CU_FN(cuTexRefGetFormat, CUarray_format *, int *, CUtexref);
CU_FN(cuTexRefSetAddressMode, CUtexref, int, CUaddress_mode);
CU_FN(cuTexRefGetAddressMode, CUaddress_mode *, CUtexref, int);
CU_FN(cuTexRefSetFilterMode, CUtexref, CUfilter_mode);
CU_FN(cuTexRefGetFilterMode, CUfilter_mode *, CUtexref);
CU_FN(cuTexRefSetFlags, CUtexref, unsigned int);
CU_FN(cuTexRefGetFlags, unsigned int *, CUtexref);
CU_FN(cuSurfRefSetArray, CUsurfref, CUarray, unsigned int);
CU_FN(cuSurfRefGetArray, CUarray *, CUsurfref);
CU_FN(cuParamSetTexRef, CUfunction, int, CUtexref);
CU_FN(cuLibraryLoadData, CUlibrary *, const void *, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int);
CU_FN(cuLibraryLoadFromFile, CUlibrary *, const char *, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int);
CU_FN(cuLibraryUnload, CUlibrary);
CU_FN(cuLibraryGetKernel, CUkernel *, CUlibrary, const char *);
CU_FN(cuLibraryGetKernelCount, unsigned int *, CUlibrary);
CU_FN(cuLibraryEnumerateKernels, CUkernel *, unsigned int, CUlibrary);
CU_FN(cuLibraryGetModule, CUmodule *, CUlibrary);
CU_FN(cuLibraryGetGlobal, CUdeviceptr *, size_t *, CUlibrary, const char *);
CU_FN(cuLibraryGetManaged, CUdeviceptr *, size_t *, CUlibrary, const char *);
CU_FN(cuKernelGetFunction, CUfunction *, CUkernel);
CU_FN(cuKernelGetLibrary, CUlibrary *, CUkernel);
CU_FN(cuLibraryGetManaged, CUdeviceptr *, size_t *, CUlibrary, const char *);
CU_FN(cuLibraryGetUnifiedFunction, void **, CUlibrary, const char *);
CU_FN(cuLinkCreate, unsigned int, CUjit_option *, void **, CUlinkState *);
CU_FN(cuLinkCreate_v2, unsigned int, CUjit_option *, void **, CUlinkState *);
CU_FN(cuLinkAddData, CUlinkState, CUjitInputType, void *, size_t, const char *, unsigned int, CUjit_option *, void **);
CU_FN(cuLinkAddData_v2, CUlinkState, CUjitInputType, void *, size_t, const char *, unsigned int, CUjit_option *, void **);
CU_FN(cuLinkAddFile, CUlinkState, CUjitInputType, const char *, unsigned int, CUjit_option *, void **);
CU_FN(cuLinkAddFile_v2, CUlinkState, CUjitInputType, const char *, unsigned int, CUjit_option *, void **);
CU_FN(cuLinkComplete, CUlinkState, void **, size_t *);
CU_FN(cuLinkDestroy, CUlinkState);
CU_FN(cuKernelGetName, const char **, CUkernel);
CU_FN(cuKernelGetParamInfo, CUkernel, size_t, size_t *, size_t *);
CU_FN(cuKernelGetAttribute, int *, CUfunction_attribute, CUkernel, CUdevice);
CU_FN(cuKernelSetAttribute, CUfunction_attribute, int, CUkernel, CUdevice);
CU_FN(cuKernelSetCacheConfig, CUkernel, CUfunc_cache, CUdevice);
CU_FN(cuFuncGetAttribute, int *, CUfunction_attribute, CUfunction);
CU_FN(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int);
CU_FN(cuFuncSetCacheConfig, CUfunction, CUfunc_cache);
CU_FN(cuFuncSetSharedMemConfig, CUfunction, CUsharedconfig);
CU_FN(cuFuncGetModule, CUmodule *, CUfunction);
CU_FN(cuFuncGetName, const char **, CUfunction);
CU_FN(cuFuncIsLoaded, CUfunctionLoadingState *, CUfunction);
CU_FN(cuFuncLoad, CUfunction);
CU_FN(cuFuncGetParamInfo, CUfunction, size_t, size_t *, size_t *);
CU_FN(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *, CUfunction, int, size_t);
CU_FN(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int *, CUfunction, int, size_t, unsigned int);
CU_FN(cuOccupancyMaxPotentialBlockSize, int *, int *, CUfunction, CUoccupancyB2DSize, size_t, int);
CU_FN(cuOccupancyMaxPotentialBlockSizeWithFlags, int *, int *, CUfunction, CUoccupancyB2DSize, size_t, int, unsigned int);
CU_FN(cuOccupancyAvailableDynamicSMemPerBlock, size_t *, CUfunction, int, int);
CU_FN(cuOccupancyMaxPotentialClusterSize, int *, CUfunction, const CUlaunchConfig *);
CU_FN(cuOccupancyMaxActiveClusters, int *, CUfunction, const CUlaunchConfig *);
CU_FN(cuTensorMapEncodeTiled, CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
      const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
CU_FN(cuTensorMapEncodeIm2col, CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const int *,
      const int *, cuuint32_t, cuuint32_t, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
      CUtensorMapFloatOOBfill);
CU_FN(cuTensorMapReplaceAddress, CUtensorMap *, void *);

/* launches */
CU_FN_PTSZ(cuLaunchKernel, CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
		   unsigned int, CUstream, void **, void **);
CU_FN_PTSZ(cuLaunchKernelEx, const CUlaunchConfig *, CUfunction, void **, void **);
CU_FN_PTSZ(cuLaunchCooperativeKernel, CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
		   unsigned int, unsigned int, CUstream, void **);
CU_FN(cuLaunchCooperativeKernelMultiDevice, CUDA_LAUNCH_PARAMS *, unsigned int, unsigned int);
CU_FN_PTSZ(cuLaunchHostFunc, CUstream, CUhostFn, void *);
CU_FN(cuFuncSetBlockShape, CUfunction, int, int, int);
CU_FN(cuFuncSetSharedSize, CUfunction, unsigned int);
CU_FN(cuParamSetSize, CUfunction, unsigned int);
CU_FN(cuParamSeti, CUfunction, int, unsigned int);
CU_FN(cuParamSetf, CUfunction, int, float);
CU_FN(cuParamSetv, CUfunction, int, void *, unsigned int);
CU_FN(cuLaunch, CUfunction);
CU_FN(cuLaunchGrid, CUfunction, int, int);
CU_FN(cuLaunchGridAsync, CUfunction, int, int, CUstream);

/* streams */
CU_FN(cuStreamCreate, CUstream *, unsigned int);
CU_FN(cuStreamCreateWithPriority, CUstream *, unsigned int, int);
CU_FN(cuStreamDestroy, CUstream);
CU_FN(cuStreamDestroy_v2, CUstream);
CU_FN_PTSZ(cuStreamGetPriority, CUstream, int *);
CU_FN_PTSZ(cuStreamGetDevice, CUstream, CUdevice *);
CU_FN_PTSZ(cuStreamGetFlags, CUstream, unsigned int *);
CU_FN_PTSZ(cuStreamGetId, CUstream, unsigned long long *);
CU_FN_PTSZ(cuStreamGetCtx, CUstream, CUcontext *);
CU_FN_PTSZ(cuStreamGetCtx_v2, CUstream, CUcontext *, CUgreenCtx *);
CU_FN_PTSZ(cuStreamWaitEvent, CUstream, CUevent, unsigned int);
CU_FN_PTSZ(cuStreamWriteValue32, CUstream, CUdeviceptr, cuuint32_t, unsigned int);
CU_FN_PTSZ(cuStreamWriteValue32_v2, CUstream, CUdeviceptr, cuuint32_t, unsigned int);
CU_FN_PTSZ(cuStreamWriteValue64, CUstream, CUdeviceptr, cuuint64_t, unsigned int);
CU_FN_PTSZ(cuStreamWriteValue64_v2, CUstream, CUdeviceptr, cuuint64_t, unsigned int);
CU_FN_PTSZ(cuStreamWaitValue32, CUstream, CUdeviceptr, cuuint32_t, unsigned int);
CU_FN_PTSZ(cuStreamWaitValue32_v2, CUstream, CUdeviceptr, cuuint32_t, unsigned int);
CU_FN_PTSZ(cuStreamWaitValue64, CUstream, CUdeviceptr, cuuint64_t, unsigned int);
CU_FN_PTSZ(cuStreamWaitValue64_v2, CUstream, CUdeviceptr, cuuint64_t, unsigned int);
CU_FN_PTSZ(cuStreamBatchMemOp, CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int);
CU_FN_PTSZ(cuStreamBatchMemOp_v2, CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int);
CU_FN_PTSZ(cuStreamAddCallback, CUstream, CUstreamCallback, void *, unsigned int);
CU_FN_PTSZ(cuStreamAttachMemAsync, CUstream, CUdeviceptr, size_t, unsigned int);
CU_FN_PTSZ(cuStreamQuery, CUstream);
CU_FN_PTSZ(cuStreamSynchronize, CUstream);
CU_FN_PTSZ(cuStreamCopyAttributes, CUstream, CUstream);
CU_FN_PTSZ(cuStreamGetAttribute, CUstream, CUstreamAttrID, CUstreamAttrValue *);
CU_FN_PTSZ(cuStreamSetAttribute, CUstream, CUstreamAttrID, const CUstreamAttrValue *);
CU_FN_PTSZ(cuStreamBeginCapture, CUstream);
CU_FN_PTSZ(cuStreamBeginCapture_v2, CUstream, CUstreamCaptureMode);
CU_FN_PTSZ(cuStreamBeginRecaptureToGraph, CUstream, CUstreamCaptureMode, CUgraph, CUgraphRecaptureCallback, void *);
CU_FN_PTSZ(cuStreamBeginCaptureToCig, CUstream, CUstreamCigCaptureParams *);
CU_FN_PTSZ(cuStreamEndCaptureToCig, CUstream);
CU_FN_PTSZ(cuStreamBeginCaptureToGraph, CUstream, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, CUstreamCaptureMode);
CU_FN_PTSZ(cuStreamEndCapture, CUstream, CUgraph *);
CU_FN_PTSZ(cuStreamIsCapturing, CUstream, CUstreamCaptureStatus *);
CU_FN_PTSZ(cuStreamGetCaptureInfo, CUstream, CUstreamCaptureStatus *, cuuint64_t *);
CU_FN_PTSZ(cuStreamGetCaptureInfo_v2, CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *);
CU_FN_PTSZ(cuStreamGetCaptureInfo_v3, CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **,
		   const CUgraphEdgeData **, size_t *);
CU_FN_PTSZ(cuStreamUpdateCaptureDependencies, CUstream, CUgraphNode *, size_t, unsigned int);
CU_FN_PTSZ(cuStreamUpdateCaptureDependencies_v2, CUstream, CUgraphNode *, const CUgraphEdgeData *, size_t, unsigned int);
CU_FN(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *);

/* events */
CU_FN(cuEventCreate, CUevent *, unsigned int);
CU_FN_PTSZ(cuEventRecord, CUevent, CUstream);
CU_FN_PTSZ(cuEventRecordWithFlags, CUevent, CUstream, unsigned int);
CU_FN(cuEventQuery, CUevent);
CU_FN(cuEventSynchronize, CUevent);
CU_FN(cuEventDestroy, CUevent);
CU_FN(cuEventDestroy_v2, CUevent);
CU_FN(cuEventElapsedTime, float *, CUevent, CUevent);
CU_FN(cuEventElapsedTime_v2, float *, CUevent, CUevent);

/* graphs */
CU_FN(cuGraphCreate, CUgraph *, unsigned int);
CU_FN(cuGraphDestroy, CUgraph);
CU_FN(cuGraphClone, CUgraph *, CUgraph);
CU_FN(cuGraphNodeFindInClone, CUgraphNode *, CUgraphNode, CUgraph);
CU_FN(cuGraphAddKernelNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_KERNEL_NODE_PARAMS_v1 *);
CU_FN(cuGraphAddKernelNode_v2, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_KERNEL_NODE_PARAMS *);
CU_FN(cuGraphKernelNodeGetParams, CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v1 *);
CU_FN(cuGraphKernelNodeGetParams_v2, CUgraphNode, CUDA_KERNEL_NODE_PARAMS *);
CU_FN(cuGraphKernelNodeSetParams, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1 *);
CU_FN(cuGraphKernelNodeSetParams_v2, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *);
CU_FN(cuGraphAddMemcpyNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_MEMCPY3D *, CUcontext);
CU_FN(cuGraphMemcpyNodeGetParams, CUgraphNode, CUDA_MEMCPY3D *);
CU_FN(cuGraphMemcpyNodeSetParams, CUgraphNode, const CUDA_MEMCPY3D *);
CU_FN(cuGraphAddMemsetNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_MEMSET_NODE_PARAMS *, CUcontext);
CU_FN(cuGraphMemsetNodeGetParams, CUgraphNode, CUDA_MEMSET_NODE_PARAMS *);
CU_FN(cuGraphMemsetNodeSetParams, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS *);
CU_FN(cuGraphAddHostNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_HOST_NODE_PARAMS *);
CU_FN(cuGraphHostNodeGetParams, CUgraphNode, CUDA_HOST_NODE_PARAMS *);
CU_FN(cuGraphHostNodeSetParams, CUgraphNode, const CUDA_HOST_NODE_PARAMS *);
CU_FN(cuGraphAddChildGraphNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraph);
CU_FN(cuGraphChildGraphNodeGetGraph, CUgraphNode, CUgraph *);
CU_FN(cuGraphAddEmptyNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t);
CU_FN(cuGraphAddEventRecordNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUevent);
CU_FN(cuGraphAddEventWaitNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUevent);
CU_FN(cuGraphAddBatchMemOpNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_BATCH_MEM_OP_NODE_PARAMS *);
CU_FN(cuGraphBatchMemOpNodeGetParams, CUgraphNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *);
CU_FN(cuGraphBatchMemOpNodeSetParams, CUgraphNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *);
CU_FN(cuGraphExecBatchMemOpNodeSetParams, CUgraphExec, CUgraphNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *);
CU_FN(cuGraphAddMemAllocNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *);
CU_FN(cuGraphMemAllocNodeGetParams, CUgraphNode, CUDA_MEM_ALLOC_NODE_PARAMS *);
CU_FN(cuGraphAddMemFreeNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr);
CU_FN(cuGraphMemFreeNodeGetParams, CUgraphNode, CUdeviceptr *);
CU_FN(cuGraphAddNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraphNodeParams *);
CU_FN(cuGraphAddNode_v2, CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, CUgraphNodeParams *);
CU_FN(cuGraphAddNode_v3, CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, CUgraphNodeParams *);
CU_FN(cuGraphNodeSetParams, CUgraphNode, CUgraphNodeParams *);
CU_FN(cuGraphExecNodeSetParams, CUgraphExec, CUgraphNode, CUgraphNodeParams *);
CU_FN(cuGraphNodeGetType, CUgraphNode, CUgraphNodeType *);
CU_FN(cuGraphGetNodes, CUgraph, CUgraphNode *, size_t *);
CU_FN(cuGraphGetRootNodes, CUgraph, CUgraphNode *, size_t *);
CU_FN(cuGraphGetEdges, CUgraph, CUgraphNode *, CUgraphNode *, size_t *);
CU_FN(cuGraphGetEdges_v2, CUgraph, CUgraphNode *, CUgraphNode *, CUgraphEdgeData *, size_t *);
CU_FN(cuGraphNodeGetDependencies, CUgraphNode, CUgraphNode *, size_t *);
CU_FN(cuGraphNodeGetDependencies_v2, CUgraphNode, CUgraphNode *, CUgraphEdgeData *, size_t *);
CU_FN(cuGraphNodeGetDependentNodes, CUgraphNode, CUgraphNode *, size_t *);
CU_FN(cuGraphNodeGetDependentNodes_v2, CUgraphNode, CUgraphNode *, CUgraphEdgeData *, size_t *);
CU_FN(cuGraphAddDependencies, CUgraph, const CUgraphNode *, const CUgraphNode *, size_t);
CU_FN(cuGraphAddDependencies_v2, CUgraph, const CUgraphNode *, const CUgraphNode *, const CUgraphEdgeData *, size_t);
CU_FN(cuGraphRemoveDependencies, CUgraph, const CUgraphNode *, const CUgraphNode *, size_t);
CU_FN(cuGraphRemoveDependencies_v2, CUgraph, const CUgraphNode *, const CUgraphNode *, const CUgraphEdgeData *, size_t);
CU_FN(cuGraphConditionalHandleCreate, CUgraphConditionalHandle *, CUgraph, CUcontext, unsigned int, unsigned int);
CU_FN(cuUserObjectCreate, CUuserObject *, void *, CUhostFn, unsigned int, unsigned int);
CU_FN(cuUserObjectRetain, CUuserObject, unsigned int);
CU_FN(cuUserObjectRelease, CUuserObject, unsigned int);
CU_FN(cuGraphRetainUserObject, CUgraph, CUuserObject, unsigned int, unsigned int);
CU_FN(cuGraphReleaseUserObject, CUgraph, CUuserObject, unsigned int);
CU_FN(cuGraphEventRecordNodeGetEvent, CUgraphNode, CUevent *);
CU_FN(cuGraphEventRecordNodeSetEvent, CUgraphNode, CUevent);
CU_FN(cuGraphEventWaitNodeGetEvent, CUgraphNode, CUevent *);
CU_FN(cuGraphEventWaitNodeSetEvent, CUgraphNode, CUevent);
CU_FN(cuGraphExecEventRecordNodeSetEvent, CUgraphExec, CUgraphNode, CUevent);
CU_FN(cuGraphExecEventWaitNodeSetEvent, CUgraphExec, CUgraphNode, CUevent);
CU_FN(cuGraphExecChildGraphNodeSetParams, CUgraphExec, CUgraphNode, CUgraph);
CU_FN(cuGraphKernelNodeGetAttribute, CUgraphNode, CUkernelNodeAttrID, CUkernelNodeAttrValue *);
CU_FN(cuGraphKernelNodeSetAttribute, CUgraphNode, CUkernelNodeAttrID, const CUkernelNodeAttrValue *);
CU_FN(cuGraphKernelNodeCopyAttributes, CUgraphNode, CUgraphNode);
CU_FN(cuGraphDebugDotPrint, CUgraph, const char *, unsigned int);
CU_FN(cuLogsRegisterCallback, CUlogsCallback, void *, CUlogsCallbackHandle *);
CU_FN(cuLogsUnregisterCallback, CUlogsCallbackHandle);
CU_FN(cuLogsCurrent, CUlogIterator *, unsigned int);
CU_FN(cuLogsDumpToFile, CUlogIterator *, const char *, unsigned int);
CU_FN(cuLogsDumpToMemory, CUlogIterator *, char *, size_t *, unsigned int);
CU_FN(cuGraphGetId, CUgraph, unsigned int *);
CU_FN(cuGraphExecGetId, CUgraphExec, unsigned int *);
CU_FN(cuGraphNodeGetContainingGraph, CUgraphNode, CUgraph *);
CU_FN(cuGraphNodeGetLocalId, CUgraphNode, unsigned int *);
CU_FN(cuGraphNodeGetToolsId, CUgraphNode, unsigned long long *);
CU_FN(cuGraphDestroyNode, CUgraphNode);
CU_FN(cuGraphInstantiate, CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CU_FN(cuGraphInstantiate_v2, CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CU_FN(cuGraphInstantiateWithFlags, CUgraphExec *, CUgraph, unsigned long long);
CU_FN_PTSZ(cuGraphInstantiateWithParams, CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);
CU_FN(cuGraphExecGetFlags, CUgraphExec, cuuint64_t *);
CU_FN(cuGraphExecKernelNodeSetParams, CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1 *);
CU_FN(cuGraphExecKernelNodeSetParams_v2, CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *);
CU_FN(cuGraphExecMemcpyNodeSetParams, CUgraphExec, CUgraphNode, const CUDA_MEMCPY3D *, CUcontext);
CU_FN(cuGraphExecMemsetNodeSetParams, CUgraphExec, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS *, CUcontext);
CU_FN(cuGraphExecHostNodeSetParams, CUgraphExec, CUgraphNode, const CUDA_HOST_NODE_PARAMS *);
CU_FN(cuGraphNodeSetEnabled, CUgraphExec, CUgraphNode, unsigned int);
CU_FN(cuGraphNodeGetEnabled, CUgraphExec, CUgraphNode, unsigned int *);
CU_FN(cuGraphExecUpdate, CUgraphExec, CUgraph, CUgraphNode *, CUgraphExecUpdateResult *);
CU_FN(cuGraphExecUpdate_v2, CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *);
CU_FN_PTSZ(cuGraphUpload, CUgraphExec, CUstream);
CU_FN_PTSZ(cuGraphLaunch, CUgraphExec, CUstream);
CU_FN(cuGraphExecDestroy, CUgraphExec);

#undef CU_FN
#undef CU_FN_PTSZ
#undef CU_FN_PTDS

#pragma GCC visibility pop

#endif
