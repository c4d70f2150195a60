/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_unsupported.c - functions that the library has and this hardware does not: fans on passively cooled boards, vGPU hosts, Windows
 * driver models, video sessions, confidential computing, tuning of clocks and links.
 *
 * A real driver exports all of them and returns NOT_SUPPORTED, after it has checked the handle; a caller that probes for a symbol, or
 * distinguishes "no such function" from "not on this GPU", sees the same here. Arguments after the handle are never used, so one shape
 * serves all. */
#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define QUERY(function)                                      \
	NVML_API nvmlReturn_t function(nvmlDevice_t device); \
	NVML_API nvmlReturn_t function(nvmlDevice_t device)  \
	{                                                    \
		TARGET(sim_nvml_target, device);             \
		return NVML_ERROR_NOT_SUPPORTED;             \
	}

/* Functions that change something are refused to all users but root, before they are refused as unsupported. */
#define SETTER(function)                                                                     \
	NVML_API nvmlReturn_t function(nvmlDevice_t device);                                 \
	NVML_API nvmlReturn_t function(nvmlDevice_t device)                                  \
	{                                                                                    \
		TARGET(sim_nvml_target, device);                                             \
		REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION); \
		return NVML_ERROR_NOT_SUPPORTED;                                             \
	}

/* cooling */
QUERY(nvmlDeviceGetFanSpeed)
QUERY(nvmlDeviceGetFanSpeed_v2)
QUERY(nvmlDeviceGetFanSpeedRPM)
QUERY(nvmlDeviceGetTargetFanSpeed)
QUERY(nvmlDeviceGetMinMaxFanSpeed)
QUERY(nvmlDeviceGetFanControlPolicy_v2)
QUERY(nvmlDeviceGetCoolerInfo)
QUERY(nvmlDeviceGetThermalSettings)
SETTER(nvmlDeviceSetFanSpeed_v2)
SETTER(nvmlDeviceSetDefaultFanSpeed_v2)
SETTER(nvmlDeviceSetFanControlPolicy)
SETTER(nvmlDeviceSetTemperatureThreshold)

/* clocks and power beyond the limit */
QUERY(nvmlDeviceGetAutoBoostedClocksEnabled)
QUERY(nvmlDeviceGetAdaptiveClockInfoStatus)
QUERY(nvmlDeviceGetClkMonStatus)
QUERY(nvmlDeviceGetClockOffsets)
QUERY(nvmlDeviceGetCurrentClockFreqs)
QUERY(nvmlDeviceGetGpcClkMinMaxVfOffset)
QUERY(nvmlDeviceGetGpcClkVfOffset)
QUERY(nvmlDeviceGetMemClkMinMaxVfOffset)
QUERY(nvmlDeviceGetMemClkVfOffset)
QUERY(nvmlDeviceGetMinMaxClockOfPState)
QUERY(nvmlDeviceGetPerformanceModes)
QUERY(nvmlDeviceGetSupportedPerformanceStates)
QUERY(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles)
QUERY(nvmlDeviceWorkloadPowerProfileGetProfilesInfo)
SETTER(nvmlDevicePowerSmoothingActivatePresetProfile)
SETTER(nvmlDevicePowerSmoothingSetState)
SETTER(nvmlDevicePowerSmoothingUpdatePresetProfileParam)
SETTER(nvmlDeviceResetApplicationsClocks)
SETTER(nvmlDeviceResetGpuLockedClocks)
SETTER(nvmlDeviceResetMemoryLockedClocks)
SETTER(nvmlDeviceSetApplicationsClocks)
SETTER(nvmlDeviceSetAutoBoostedClocksEnabled)
SETTER(nvmlDeviceSetClockOffsets)
SETTER(nvmlDeviceSetDefaultAutoBoostedClocksEnabled)
SETTER(nvmlDeviceSetGpcClkVfOffset)
SETTER(nvmlDeviceSetGpuLockedClocks)
SETTER(nvmlDeviceSetMemClkVfOffset)
SETTER(nvmlDeviceSetMemoryLockedClocks)
SETTER(nvmlDeviceSetPowerManagementLimit_v2)
SETTER(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles)
SETTER(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles)

/* boards and other operating systems */
QUERY(nvmlDeviceGetAPIRestriction)
QUERY(nvmlDeviceGetBridgeChipInfo)
QUERY(nvmlDeviceGetCapabilities)
QUERY(nvmlDeviceGetDriverModel)
QUERY(nvmlDeviceGetDriverModel_v2)
QUERY(nvmlDeviceGetGpuOperationMode)
QUERY(nvmlDeviceGetInforomConfigurationChecksum)
QUERY(nvmlDeviceGetInforomImageVersion)
QUERY(nvmlDeviceGetInforomVersion)
QUERY(nvmlDeviceGetIrqNum)
QUERY(nvmlDeviceGetLastBBXFlushTime)
QUERY(nvmlDeviceGetPdi)
QUERY(nvmlDeviceGetPlatformInfo)
QUERY(nvmlDeviceValidateInforom)
SETTER(nvmlDeviceClearAccountingPids)
SETTER(nvmlDeviceClearCpuAffinity)
SETTER(nvmlDeviceSetAPIRestriction)
SETTER(nvmlDeviceSetAccountingMode)
SETTER(nvmlDeviceSetCpuAffinity)
SETTER(nvmlDeviceSetDriverModel)
SETTER(nvmlDeviceSetGpuOperationMode)

/* video sessions */
QUERY(nvmlDeviceGetEncoderCapacity)
QUERY(nvmlDeviceGetEncoderSessions)
QUERY(nvmlDeviceGetEncoderStats)
QUERY(nvmlDeviceGetFBCSessions)
QUERY(nvmlDeviceGetFBCStats)

/* confidential computing, encryption, SRAM detail */
QUERY(nvmlDeviceGetConfComputeGpuAttestationReport)
QUERY(nvmlDeviceGetConfComputeGpuCertificate)
QUERY(nvmlDeviceGetConfComputeProtectedMemoryUsage)
QUERY(nvmlDeviceGetDramEncryptionMode)
QUERY(nvmlDeviceGetSramEccErrorStatus)
QUERY(nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts)
SETTER(nvmlDeviceSetConfComputeUnprotectedMemSize)
SETTER(nvmlDeviceSetDramEncryptionMode)

/* NVLink tuning and its old counters */
QUERY(nvmlDeviceGetNvLinkInfo)
QUERY(nvmlDeviceGetNvLinkUtilizationControl)
QUERY(nvmlDeviceGetNvLinkUtilizationCounter)
QUERY(nvmlDeviceGetNvlinkBwMode)
QUERY(nvmlDeviceGetNvlinkSupportedBwModes)
SETTER(nvmlDeviceClearFieldValues)
SETTER(nvmlDeviceFreezeNvLinkUtilizationCounter)
SETTER(nvmlDeviceResetNvLinkErrorCounters)
SETTER(nvmlDeviceResetNvLinkUtilizationCounter)
SETTER(nvmlDeviceSetNvLinkDeviceLowPowerThreshold)
SETTER(nvmlDeviceSetNvLinkUtilizationControl)
SETTER(nvmlDeviceSetNvlinkBwMode)

/* GPM streaming */
QUERY(nvmlGpmQueryIfStreamingEnabled)
SETTER(nvmlGpmSetStreamingEnabled)

/* vGPU hosts */
QUERY(nvmlDeviceGetActiveVgpus)
QUERY(nvmlDeviceGetCreatableVgpus)
QUERY(nvmlDeviceGetHostVgpuMode)
QUERY(nvmlDeviceGetPgpuMetadataString)
QUERY(nvmlDeviceGetSupportedVgpus)
QUERY(nvmlDeviceGetVgpuCapabilities)
QUERY(nvmlDeviceGetVgpuHeterogeneousMode)
QUERY(nvmlDeviceGetVgpuInstancesUtilizationInfo)
QUERY(nvmlDeviceGetVgpuMetadata)
QUERY(nvmlDeviceGetVgpuProcessUtilization)
QUERY(nvmlDeviceGetVgpuProcessesUtilizationInfo)
QUERY(nvmlDeviceGetVgpuSchedulerCapabilities)
QUERY(nvmlDeviceGetVgpuSchedulerLog)
QUERY(nvmlDeviceGetVgpuSchedulerState)
QUERY(nvmlDeviceGetVgpuTypeCreatablePlacements)
QUERY(nvmlDeviceGetVgpuTypeSupportedPlacements)
QUERY(nvmlDeviceGetVgpuUtilization)
SETTER(nvmlDeviceSetVgpuCapabilities)
SETTER(nvmlDeviceSetVgpuHeterogeneousMode)
SETTER(nvmlDeviceSetVgpuSchedulerState)
SETTER(nvmlDeviceSetVirtualizationMode)
SETTER(nvmlDeviceVgpuForceGspUnload)

/* ---- things that do not exist here ---- */

static nvmlReturn_t none(unsigned int *count)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(count);
	*count = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
	return none(count);
}
NVML_API nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count)
{
	return none(count);
}

NVML_API nvmlReturn_t nvmlUnitGetHandleByIndex(unsigned int index, nvmlUnit_t *unit)
{
	struct sim_state *state;
	(void)index;
	(void)unit;
	nvmlReturn_t status = sim_nvml_enter(&state);
	return status == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : status; /* every index is out of range */
}

NVML_API nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *count)
{
	TARGET(sim_nvml_gpu, device);
	return none(count);
}
