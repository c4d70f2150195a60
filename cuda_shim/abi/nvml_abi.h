/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_abi.h - the part of NVML's binary interface that the simulated driver answers and the shim looks at.
 *
 * NVIDIA publishes this interface with CUDA. The names, numbers and layouts are NVIDIA's, written again so that the build needs no
 * CUDA toolkit. Sizes are checked below, and against nvidia-ml-py's ctypes structures by tests/integration/test_sim_nvml.py.
 * A versioned struct starts with a version word: its size | version << 24. A library that finds another word answers
 * NVML_ERROR_ARGUMENT_VERSION_MISMATCH. */

/* A table of declarations, aligned by hand. */
/* clang-format off */
#ifndef ALIQUOT_NVML_ABI_H
#define ALIQUOT_NVML_ABI_H

#include <stddef.h>

typedef struct nvmlDevice_st          *nvmlDevice_t;
typedef struct nvmlGpuInstance_st     *nvmlGpuInstance_t;
typedef struct nvmlComputeInstance_st *nvmlComputeInstance_t;
typedef struct nvmlEventSet_st        *nvmlEventSet_t;
typedef struct nvmlGpmSample_st       *nvmlGpmSample_t;
typedef struct nvmlUnit_st            *nvmlUnit_t;

typedef enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_ALREADY_INITIALIZED = 5,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_INSUFFICIENT_POWER = 8,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_IRQ_ISSUE = 11,
	NVML_ERROR_LIBRARY_NOT_FOUND = 12,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
	NVML_ERROR_CORRUPTED_INFOROM = 14,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_RESET_REQUIRED = 16,
	NVML_ERROR_OPERATING_SYSTEM = 17,
	NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
	NVML_ERROR_IN_USE = 19,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_NO_DATA = 21,
	NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22,
	NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
	NVML_ERROR_FREQ_NOT_SUPPORTED = 24,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_DEPRECATED = 26,
	NVML_ERROR_NOT_READY = 27,
	NVML_ERROR_GPU_NOT_FOUND = 28,
	NVML_ERROR_INVALID_STATE = 29,
	NVML_ERROR_RESET_TYPE_NOT_SUPPORTED = 30,
	NVML_ERROR_UNKNOWN = 999
} nvmlReturn_t;

#define NVML_VERSION_WORD(type, version) ((unsigned int)(sizeof(type) | ((version) << 24)))
#define NVML_VALUE_NOT_AVAILABLE_ULL     0xffffffffffffffffULL  /* usedGpuMemory when the driver does not know it */

#define NVML_INIT_FLAG_NO_GPUS    1u
#define NVML_INIT_FLAG_NO_ATTACH  2u
#define NVML_INIT_FLAG_FORCE_INIT 4u

/* ---- inventory ---- */

#define NVML_DEVICE_UUID_BUFFER_SIZE       80
#define NVML_DEVICE_UUID_V2_BUFFER_SIZE    96
#define NVML_DEVICE_NAME_BUFFER_SIZE       64
#define NVML_DEVICE_NAME_V2_BUFFER_SIZE    96
#define NVML_DEVICE_SERIAL_BUFFER_SIZE     30
#define NVML_DEVICE_VBIOS_VERSION_BUFFER_SIZE 32
#define NVML_DEVICE_PART_NUMBER_BUFFER_SIZE   80
#define NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE 80
#define NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE   80

typedef enum { NVML_FEATURE_DISABLED = 0, NVML_FEATURE_ENABLED = 1 } nvmlEnableState_t;

enum {
	NVML_BRAND_UNKNOWN = 0, NVML_BRAND_QUADRO = 1, NVML_BRAND_TESLA = 2, NVML_BRAND_GEFORCE = 5, NVML_BRAND_TITAN = 6,
	NVML_BRAND_QUADRO_RTX = 12, NVML_BRAND_NVIDIA_RTX = 13, NVML_BRAND_NVIDIA = 14
};
typedef unsigned int nvmlBrandType_t;

enum {
	NVML_DEVICE_ARCH_KEPLER = 2, NVML_DEVICE_ARCH_MAXWELL = 3, NVML_DEVICE_ARCH_PASCAL = 4, NVML_DEVICE_ARCH_VOLTA = 5,
	NVML_DEVICE_ARCH_TURING = 6,
	NVML_DEVICE_ARCH_AMPERE = 7, NVML_DEVICE_ARCH_ADA = 8, NVML_DEVICE_ARCH_HOPPER = 9, NVML_DEVICE_ARCH_BLACKWELL = 10
};
typedef unsigned int nvmlDeviceArchitecture_t;

typedef enum {
	NVML_COMPUTEMODE_DEFAULT = 0, NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1, NVML_COMPUTEMODE_PROHIBITED = 2,
	NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3,
	NVML_COMPUTEMODE_COUNT
} nvmlComputeMode_t;

enum { NVML_BUS_TYPE_PCI = 1, NVML_BUS_TYPE_PCIE = 2 };
enum { NVML_POWER_SOURCE_AC = 0 };
enum { NVML_GPU_VIRTUALIZATION_MODE_NONE = 0 };
#define NVML_GSP_FIRMWARE_VERSION_BUF_SIZE 64

typedef struct {
	char busIdLegacy[16];
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

/* What nvmlDeviceGetPciInfo and _v2 fill: the older struct without the long bus id. */
typedef struct {
	char busId[16];
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
	unsigned int reserved[4];
} nvmlPciInfo_v2_t;

typedef struct {
	unsigned int version;
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId, baseClass, subClass;
	char busId[32];
} nvmlPciInfoExt_v1_t;

typedef struct {
	unsigned int version;
	unsigned int type;      /* 1 text, 2 binary */
	union { char str[41]; unsigned char bytes[16]; } value;
} nvmlUUID_v1_t;

typedef struct {
	unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	unsigned int gpuInstanceSliceCount, computeInstanceSliceCount;
	unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct { unsigned int version; char branch[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE]; } nvmlSystemDriverBranchInfo_v1_t;
typedef struct { unsigned int version; unsigned int value; } nvmlDeviceAddressingMode_v1_t;
typedef struct { unsigned int isC2cEnabled; } nvmlC2cModeInfo_v1_t;

/* ---- memory ---- */

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned long long bar1Total, bar1Free, bar1Used; } nvmlBAR1Memory_t;
typedef struct { unsigned long long protectedMemSizeKib, unprotectedMemSizeKib; } nvmlConfComputeMemSizeInfo_t;

#define NVML_DEVICE_MEMORY_LIMIT_MAX 0xffffffffffffffffULL
typedef struct { const char *nameSpace; unsigned long long softLimit, hardLimit; } nvmlSetMemoryLimits_v1_t;
typedef struct { const char *nameSpace; unsigned long long softLimit, hardLimit, currentUsed; } nvmlGetMemoryLimits_v1_t;

/* ---- processes and utilisation ---- */

typedef struct { unsigned int pid; unsigned long long usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId; } nvmlProcessInfo_v2_t;
typedef nvmlProcessInfo_v2_t nvmlProcessInfo_v3_t;  /* the _v3 calls kept the layout */

typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId, computeInstanceId;
	unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;
typedef struct { unsigned int version, mode, numProcArrayEntries; nvmlProcessDetail_v1_t *procArray; } nvmlProcessDetailList_v1_t;
enum { NVML_PROCESS_MODE_COMPUTE = 0, NVML_PROCESS_MODE_GRAPHICS = 1, NVML_PROCESS_MODE_MPS = 2, NVML_PROCESS_MODE_ALL = 3,
	NVML_PROCESS_MODE_MAX };

#define NVML_NO_INSTANCE 0xffffffffu    /* gpuInstanceId and computeInstanceId of a process outside MIG */

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned int pid; unsigned long long timeStamp; unsigned int smUtil, memUtil, encUtil, decUtil;
	} nvmlProcessUtilizationSample_t;
typedef struct {
	unsigned long long timeStamp;
	unsigned int pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;
typedef struct {
	unsigned int version, processSamplesCount;
	unsigned long long lastSeenTimeStamp;
	nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_v1_t;

typedef enum {
	NVML_VALUE_TYPE_DOUBLE = 0, NVML_VALUE_TYPE_UNSIGNED_INT = 1, NVML_VALUE_TYPE_UNSIGNED_LONG = 2,
	NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
	NVML_VALUE_TYPE_SIGNED_LONG_LONG = 4, NVML_VALUE_TYPE_SIGNED_INT = 5, NVML_VALUE_TYPE_UNSIGNED_SHORT = 6
} nvmlValueType_t;
typedef union {
	double dVal;
	int siVal;
	unsigned int uiVal;
	unsigned long ulVal;
	unsigned long long ullVal;
	long long sllVal;
	unsigned short usVal;
} nvmlValue_t;
typedef struct { unsigned long long timeStamp; nvmlValue_t sampleValue; } nvmlSample_t;
typedef enum {
	NVML_TOTAL_POWER_SAMPLES = 0, NVML_GPU_UTILIZATION_SAMPLES = 1, NVML_MEMORY_UTILIZATION_SAMPLES = 2,
	NVML_ENC_UTILIZATION_SAMPLES = 3,
	NVML_DEC_UTILIZATION_SAMPLES = 4, NVML_PROCESSOR_CLK_SAMPLES = 5, NVML_MEMORY_CLK_SAMPLES = 6, NVML_MODULE_POWER_SAMPLES = 7,
	NVML_JPG_UTILIZATION_SAMPLES = 8, NVML_OFA_UTILIZATION_SAMPLES = 9
} nvmlSamplingType_t;

typedef struct {
	unsigned int gpuUtilization, memoryUtilization;
	unsigned long long maxMemoryUsage, time, startTime;
	unsigned int isRunning, reserved[5];
} nvmlAccountingStats_t;
typedef struct {
	unsigned int pid, isRunning, gpuUtilization, memoryUtilization;
	unsigned long long maxMemoryUsage;
	unsigned int sampleCount;
	unsigned long long sumGpuUtil, sumFbUtil, time, startTime;
} nvmlAccountingStats_v2_t;

/* ---- MIG ---- */

enum { NVML_DEVICE_MIG_DISABLE = 0, NVML_DEVICE_MIG_ENABLE = 1 };

/* Indices into the profiles of a GPU; not profile IDs. */
enum {
	NVML_GPU_INSTANCE_PROFILE_1_SLICE = 0, NVML_GPU_INSTANCE_PROFILE_2_SLICE = 1, NVML_GPU_INSTANCE_PROFILE_3_SLICE = 2,
	NVML_GPU_INSTANCE_PROFILE_4_SLICE = 3, NVML_GPU_INSTANCE_PROFILE_7_SLICE = 4, NVML_GPU_INSTANCE_PROFILE_8_SLICE = 5,
	NVML_GPU_INSTANCE_PROFILE_6_SLICE = 6, NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 = 7, NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1 = 8,
	NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2 = 9, NVML_GPU_INSTANCE_PROFILE_COUNT = 0x12
};
enum {
	NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE = 0, NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE = 1, NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE = 2,
	NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE = 3, NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE = 4, NVML_COMPUTE_INSTANCE_PROFILE_8_SLICE = 5,
	NVML_COMPUTE_INSTANCE_PROFILE_6_SLICE = 6, NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 = 7, NVML_COMPUTE_INSTANCE_PROFILE_COUNT = 9
};
#define NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED 0
#define NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT  1
#define NVML_GPU_INSTANCE_PROFILE_CAPS_P2P          1u

typedef struct { unsigned int start, size; } nvmlGpuInstancePlacement_t;
typedef struct { unsigned int start, size; } nvmlComputeInstancePlacement_t;

typedef struct {
	unsigned int id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount;
	unsigned int copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;
typedef struct {
	unsigned int version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount;
	unsigned int copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct {
	unsigned int version, id, sliceCount, instanceCount, multiprocessorCount;
	unsigned int copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
	unsigned int capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;
typedef struct {
	nvmlDevice_t device;
	unsigned int id, profileId;
	nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
	unsigned int id, sliceCount, instanceCount, multiprocessorCount;
	unsigned int sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;
typedef struct {
	unsigned int version, id, sliceCount, instanceCount, multiprocessorCount;
	unsigned int sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
} nvmlComputeInstanceProfileInfo_v2_t;
typedef struct {
	unsigned int version, id, sliceCount, instanceCount, multiprocessorCount;
	unsigned int sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
	unsigned int capabilities;
} nvmlComputeInstanceProfileInfo_v3_t;
typedef struct {
	nvmlDevice_t device;
	nvmlGpuInstance_t gpuInstance;
	unsigned int id, profileId;
	nvmlComputeInstancePlacement_t placement;
} nvmlComputeInstanceInfo_t;

/* ---- topology, links, fabric ---- */

typedef enum {
	NVML_TOPOLOGY_INTERNAL = 0, NVML_TOPOLOGY_SINGLE = 10, NVML_TOPOLOGY_MULTIPLE = 20, NVML_TOPOLOGY_HOSTBRIDGE = 30,
	NVML_TOPOLOGY_NODE = 40, NVML_TOPOLOGY_SYSTEM = 50
} nvmlGpuTopologyLevel_t;
typedef enum {
	NVML_P2P_STATUS_OK = 0, NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED, NVML_P2P_STATUS_GPU_NOT_SUPPORTED,
	NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED, NVML_P2P_STATUS_DISABLED_BY_REGKEY, NVML_P2P_STATUS_NOT_SUPPORTED,
	NVML_P2P_STATUS_UNKNOWN
} nvmlGpuP2PStatus_t;
typedef enum {
	NVML_P2P_CAPS_INDEX_READ = 0, NVML_P2P_CAPS_INDEX_WRITE = 1, NVML_P2P_CAPS_INDEX_NVLINK = 2, NVML_P2P_CAPS_INDEX_ATOMICS = 3,
	NVML_P2P_CAPS_INDEX_PROP = 4, NVML_P2P_CAPS_INDEX_UNKNOWN = 5
} nvmlGpuP2PCapsIndex_t;
#define NVML_AFFINITY_SCOPE_NODE   0u
#define NVML_AFFINITY_SCOPE_SOCKET 1u

#define NVML_NVLINK_MAX_LINKS 36
typedef enum {
	NVML_NVLINK_CAP_P2P_SUPPORTED = 0, NVML_NVLINK_CAP_SYSMEM_ACCESS = 1, NVML_NVLINK_CAP_P2P_ATOMICS = 2,
	NVML_NVLINK_CAP_SYSMEM_ATOMICS = 3,
	NVML_NVLINK_CAP_SLI_BRIDGE = 4, NVML_NVLINK_CAP_VALID = 5, NVML_NVLINK_CAP_COUNT
} nvmlNvLinkCapability_t;
typedef enum {
	NVML_NVLINK_ERROR_DL_REPLAY = 0, NVML_NVLINK_ERROR_DL_RECOVERY = 1, NVML_NVLINK_ERROR_DL_CRC_FLIT = 2,
	NVML_NVLINK_ERROR_DL_CRC_DATA = 3,
	NVML_NVLINK_ERROR_DL_ECC_DATA = 4, NVML_NVLINK_ERROR_COUNT
} nvmlNvLinkErrorCounter_t;
typedef enum { NVML_NVLINK_DEVICE_TYPE_GPU = 0, NVML_NVLINK_DEVICE_TYPE_IBMNPU = 1,
	NVML_NVLINK_DEVICE_TYPE_SWITCH = 2 } nvmlIntNvLinkDeviceType_t;
/* nvmlDeviceGetNvLinkVersion returns these, not generations. */
enum {
	NVML_NVLINK_VERSION_1_0 = 1, NVML_NVLINK_VERSION_2_0 = 2, NVML_NVLINK_VERSION_2_2 = 3, NVML_NVLINK_VERSION_3_0 = 4,
	NVML_NVLINK_VERSION_3_1 = 5,
	NVML_NVLINK_VERSION_4_0 = 6, NVML_NVLINK_VERSION_5_0 = 7
};

enum {
	NVML_GPU_FABRIC_STATE_NOT_SUPPORTED = 0, NVML_GPU_FABRIC_STATE_NOT_STARTED = 1, NVML_GPU_FABRIC_STATE_IN_PROGRESS = 2,
	NVML_GPU_FABRIC_STATE_COMPLETED = 3
};
enum { NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED = 0, NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY = 1 };
typedef struct {
	unsigned char clusterUuid[16];
	nvmlReturn_t status;
	unsigned int cliqueId;
	unsigned char state;
} nvmlGpuFabricInfo_t;
typedef struct {
	unsigned int version;
	unsigned char clusterUuid[16];
	nvmlReturn_t status;
	unsigned int cliqueId;
	unsigned char state;
	unsigned int healthMask;
} nvmlGpuFabricInfo_v2_t;
typedef struct {
	unsigned int version;
	unsigned char clusterUuid[16];
	nvmlReturn_t status;
	unsigned int cliqueId;
	unsigned char state;
	unsigned int healthMask;
	unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;

/* ---- health ---- */

#define nvmlEventTypeSingleBitEccError 0x0001ULL
#define nvmlEventTypeDoubleBitEccError 0x0002ULL
#define nvmlEventTypePState            0x0004ULL
#define nvmlEventTypeXidCriticalError  0x0008ULL
#define nvmlEventTypeClock             0x0010ULL
#define nvmlEventTypePowerSourceChange 0x0080ULL
#define nvmlEventMigConfigChange       0x0100ULL
#define nvmlEventTypeGpuUnavailableError 0x4000ULL

typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef enum { NVML_MEMORY_ERROR_TYPE_CORRECTED = 0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1,
	NVML_MEMORY_ERROR_TYPE_COUNT } nvmlMemoryErrorType_t;
typedef enum { NVML_VOLATILE_ECC = 0, NVML_AGGREGATE_ECC = 1, NVML_ECC_COUNTER_TYPE_COUNT } nvmlEccCounterType_t;
typedef enum {
	NVML_MEMORY_LOCATION_L1_CACHE = 0, NVML_MEMORY_LOCATION_L2_CACHE = 1, NVML_MEMORY_LOCATION_DRAM = 2,
	NVML_MEMORY_LOCATION_REGISTER_FILE = 3,
	NVML_MEMORY_LOCATION_TEXTURE_MEMORY = 4, NVML_MEMORY_LOCATION_TEXTURE_SHM = 5, NVML_MEMORY_LOCATION_CBU = 6,
	NVML_MEMORY_LOCATION_SRAM = 7,
	NVML_MEMORY_LOCATION_COUNT
} nvmlMemoryLocation_t;
typedef struct { unsigned long long l1Cache, l2Cache, deviceMemory, registerFile; } nvmlEccErrorCounts_t;
typedef struct { unsigned int max, high, partial, low, none; } nvmlRowRemapperHistogramValues_t;
typedef enum {
	NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS = 0, NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1,
	NVML_PAGE_RETIREMENT_CAUSE_COUNT
} nvmlPageRetirementCause_t;
typedef struct { unsigned int version, bChannelRepairPending, bTpcRepairPending; } nvmlRepairStatus_v1_t;

/* ---- clocks, power, temperature ---- */

typedef enum { NVML_CLOCK_GRAPHICS = 0, NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2, NVML_CLOCK_VIDEO = 3, NVML_CLOCK_COUNT } nvmlClockType_t;
typedef enum {
	NVML_CLOCK_ID_CURRENT = 0, NVML_CLOCK_ID_APP_CLOCK_TARGET = 1, NVML_CLOCK_ID_APP_CLOCK_DEFAULT = 2,
	NVML_CLOCK_ID_CUSTOMER_BOOST_MAX = 3
} nvmlClockId_t;
typedef enum { NVML_PSTATE_0 = 0, NVML_PSTATE_8 = 8, NVML_PSTATE_UNKNOWN = 32 } nvmlPstates_t;
#define nvmlClocksEventReasonGpuIdle              0x001ULL
#define nvmlClocksEventReasonApplicationsClocks   0x002ULL
#define nvmlClocksEventReasonSwPowerCap           0x004ULL
#define nvmlClocksEventReasonHwSlowdown           0x008ULL
#define nvmlClocksEventReasonSwThermalSlowdown    0x020ULL
#define nvmlClocksEventReasonHwThermalSlowdown    0x040ULL
#define nvmlClocksEventReasonHwPowerBrakeSlowdown 0x080ULL

typedef enum { NVML_TEMPERATURE_GPU = 0 } nvmlTemperatureSensors_t;
typedef enum {
	NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1, NVML_TEMPERATURE_THRESHOLD_MEM_MAX = 2,
	NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3, NVML_TEMPERATURE_THRESHOLD_COUNT = 8
} nvmlTemperatureThresholds_t;
typedef struct { unsigned int version; nvmlTemperatureSensors_t sensorType; int temperature; } nvmlTemperature_v1_t;
typedef struct { unsigned int version; int marginTemperature; } nvmlMarginTemperature_v1_t;
typedef enum { NVML_PCIE_UTIL_TX_BYTES = 0, NVML_PCIE_UTIL_RX_BYTES = 1, NVML_PCIE_UTIL_COUNT } nvmlPcieUtilCounter_t;
typedef enum { NVML_PERF_POLICY_POWER = 0, NVML_PERF_POLICY_THERMAL = 1, NVML_PERF_POLICY_COUNT = 12 } nvmlPerfPolicyType_t;
typedef struct { unsigned long long referenceTime, violationTime; } nvmlViolationTime_t;

/* ---- field values ---- */

enum {
	NVML_FI_DEV_ECC_CURRENT = 1, NVML_FI_DEV_ECC_PENDING = 2,
	NVML_FI_DEV_ECC_SBE_VOL_TOTAL = 3, NVML_FI_DEV_ECC_DBE_VOL_TOTAL = 4, NVML_FI_DEV_ECC_SBE_AGG_TOTAL = 5,
	NVML_FI_DEV_ECC_DBE_AGG_TOTAL = 6,
	NVML_FI_DEV_ECC_SBE_VOL_DEV = 11, NVML_FI_DEV_ECC_DBE_VOL_DEV = 12, NVML_FI_DEV_ECC_SBE_AGG_DEV = 22,
	NVML_FI_DEV_ECC_DBE_AGG_DEV = 23,
	NVML_FI_DEV_RETIRED_SBE = 29, NVML_FI_DEV_RETIRED_DBE = 30, NVML_FI_DEV_RETIRED_PENDING = 31,
	NVML_FI_DEV_NVLINK_BANDWIDTH_C0_TOTAL = 66,
	NVML_FI_DEV_MEMORY_TEMP = 82, NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION = 83,
	NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 = 84, NVML_FI_DEV_NVLINK_SPEED_MBPS_L5 = 89, NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90,
	NVML_FI_DEV_NVLINK_LINK_COUNT = 91, NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94,
	NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 = 132, NVML_FI_DEV_NVLINK_SPEED_MBPS_L11 = 137,
	NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139,
	NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX = 140, NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX = 141,
	NVML_FI_DEV_REMAPPED_COR = 142, NVML_FI_DEV_REMAPPED_UNC = 143, NVML_FI_DEV_REMAPPED_PENDING = 144,
	NVML_FI_DEV_REMAPPED_FAILURE = 145,
	NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID = 146, NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT = 147,
	NVML_FI_DEV_NVLINK_GET_SPEED = 164, NVML_FI_DEV_NVLINK_GET_STATE = 165, NVML_FI_DEV_NVLINK_GET_VERSION = 166,
	NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED = 184,
	NVML_FI_DEV_POWER_AVERAGE = 185, NVML_FI_DEV_POWER_INSTANT = 186, NVML_FI_DEV_POWER_MIN_LIMIT = 187,
	NVML_FI_DEV_POWER_MAX_LIMIT = 188,
	NVML_FI_DEV_POWER_DEFAULT_LIMIT = 189, NVML_FI_DEV_POWER_CURRENT_LIMIT = 190, NVML_FI_DEV_ENERGY = 191,
	NVML_FI_DEV_POWER_REQUESTED_LIMIT = 192,
	NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230,
	NVML_FI_DEV_MMA_STALL_PERCENT = 297
};
typedef struct {
	unsigned int fieldId, scopeId;
	long long timestamp, latencyUsec;
	nvmlValueType_t valueType;
	nvmlReturn_t nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;
enum { NVML_GPU_RECOVERY_ACTION_NONE = 0, NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1 };

/* ---- GPM (Hopper and newer) ---- */

#define NVML_GPM_SUPPORT_VERSION     1
#define NVML_GPM_METRICS_GET_VERSION 1
enum { NVML_GPM_METRIC_GRAPHICS_UTIL = 1, NVML_GPM_METRIC_SM_UTIL = 2 };
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;
typedef struct {
	unsigned int metricId;
	nvmlReturn_t nvmlReturn;
	double value;
	struct { char *shortName, *longName, *unit; } metricInfo;
} nvmlGpmMetric_t;
typedef struct {
	unsigned int version, numMetrics;
	nvmlGpmSample_t sample1, sample2;
	nvmlGpmMetric_t metrics[];  /* a fixed array, longer in every new driver; only numMetrics entries are read */
} nvmlGpmMetricsGet_t;

enum { NVML_GPU_UTILIZATION_DOMAIN_GPU = 0, NVML_GPU_UTILIZATION_DOMAIN_FB = 1, NVML_MAX_GPU_UTILIZATIONS = 8 };
typedef struct {
	unsigned int flags;
	struct {
		unsigned int bIsPresent, percentage, incThreshold, decThreshold;
	} utilization[NVML_MAX_GPU_UTILIZATIONS];
} nvmlGpuDynamicPstatesInfo_t;

typedef struct {
	unsigned int numSamples;    /* which follow; unused here */
} nvmlPerfMetricsSamples_v1_t;

_Static_assert(sizeof(nvmlGpuDynamicPstatesInfo_t) == 132, "nvmlGpuDynamicPstatesInfo_t");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(nvmlPciInfoExt_v1_t) == 64, "nvmlPciInfoExt_v1_t");
_Static_assert(sizeof(nvmlDeviceAttributes_t) == 40, "nvmlDeviceAttributes_t");
_Static_assert(sizeof(nvmlMemory_t) == 24 && sizeof(nvmlMemory_v2_t) == 40, "nvmlMemory");
_Static_assert(sizeof(nvmlSetMemoryLimits_v1_t) == 24 && sizeof(nvmlGetMemoryLimits_v1_t) == 32, "memory limits");
_Static_assert(sizeof(nvmlProcessInfo_v1_t) == 16 && sizeof(nvmlProcessInfo_v2_t) == 24 && sizeof(nvmlProcessDetail_v1_t) == 32,
			   "process info");
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32 && sizeof(nvmlProcessUtilizationInfo_v1_t) == 40, "process utilisation");
_Static_assert(sizeof(nvmlProcessesUtilizationInfo_v1_t) == 24, "nvmlProcessesUtilizationInfo_v1_t");
_Static_assert(sizeof(nvmlSample_t) == 16 && sizeof(nvmlFieldValue_t) == 40, "samples");
_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_t) == 48 && sizeof(nvmlGpuInstanceProfileInfo_v2_t) == 152, "GPU instance profile");
_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_v3_t) == 152, "GPU instance profile v3");
_Static_assert(sizeof(nvmlComputeInstanceProfileInfo_t) == 36 && sizeof(nvmlComputeInstanceProfileInfo_v2_t) == 136,
			   "compute instance profile");
_Static_assert(sizeof(nvmlComputeInstanceProfileInfo_v3_t) == 140, "compute instance profile v3");
_Static_assert(sizeof(nvmlGpuInstanceInfo_t) == 24 && sizeof(nvmlComputeInstanceInfo_t) == 32, "MIG info");
_Static_assert(sizeof(nvmlGpuFabricInfo_t) == 28 && sizeof(nvmlGpuFabricInfo_v2_t) == 36 && sizeof(nvmlGpuFabricInfo_v3_t) == 40,
			   "fabric info");
_Static_assert(sizeof(nvmlEventData_t) == 32 && sizeof(nvmlTemperature_v1_t) == 12, "events, temperature");
_Static_assert(sizeof(nvmlAccountingStats_t) == 56, "nvmlAccountingStats_t");

#endif
