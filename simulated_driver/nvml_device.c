/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_device.c - inventory: the devices, their identity and their settings. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define PCI_CLASS_DISPLAY 0x03
#define PCI_SUBCLASS_3D   0x02

/* ---- enumeration ---- */

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	struct sim_state *state;
	const uint32_t *visible;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(count);
	*count = sim_nvml_visible_gpus(&visible);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

/* Answers a handle only when the GPU behind it is reachable. */
static nvmlReturn_t open_gpu(uint32_t gpu, nvmlDevice_t *device)
{
	TARGET(sim_nvml_gpu, sim_nvml_gpu_handle(gpu));
	*device = sim_nvml_gpu_handle(gpu);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	struct sim_state *state;
	const uint32_t *visible;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(device && index < sim_nvml_visible_gpus(&visible));
	return open_gpu(visible[index], device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* The first visible GPU for which `matches` is true. */
static nvmlReturn_t find_gpu(bool (*matches)(const struct sim_gpu *gpu, const void *key), const void *key, nvmlDevice_t *device)
{
	struct sim_state *state;
	const uint32_t *visible;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(key && device);
	uint32_t count = sim_nvml_visible_gpus(&visible);
	for (uint32_t i = 0; i < count; i++)
		if (matches(&state->topology.gpus[visible[i]], key))
			return open_gpu(visible[i], device);
	return NVML_ERROR_NOT_FOUND;
}

static bool has_uuid(const struct sim_gpu *gpu, const void *uuid)
{
	return strcmp(gpu->uuid, uuid) == 0;
}
static bool has_serial(const struct sim_gpu *gpu, const void *serial)
{
	return strcmp(gpu->serial, serial) == 0;
}
static bool has_address(const struct sim_gpu *gpu, const void *address)
{
	return memcmp(&gpu->pci, address, sizeof gpu->pci) == 0;
}

/* The MIG device of this UUID on one GPU, when the GPU answers. */
static nvmlReturn_t open_mig_device(uint32_t gpu, const char *uuid, nvmlDevice_t *device)
{
	TARGET(sim_nvml_gpu, sim_nvml_gpu_handle(gpu));
	for (uint32_t m = 0; m < SIM_MIG_MAX_DEVICES; m++) {
		const struct sim_compute_instance *ci = &t.mig.devices[m];
		if (!atomic_load(&ci->present) || strcmp(ci->uuid, uuid) || !sim_nvml_mig_visible(ci))
			continue;
		*device = sim_nvml_handle(&t, SIM_HANDLE_MIG_DEVICE, m);
		return *device ? NVML_SUCCESS : NVML_ERROR_MEMORY;
	}
	return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t find_mig_device(const char *uuid, nvmlDevice_t *device)
{
	struct sim_state *state;
	const uint32_t *visible;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	uint32_t count = sim_nvml_visible_gpus(&visible);
	status = NVML_ERROR_NOT_FOUND;
	for (uint32_t i = 0; i < count && status == NVML_ERROR_NOT_FOUND; i++)
		if (state->topology.gpus[visible[i]].mig_family != SIM_MIG_NONE)
			status = open_mig_device(visible[i], uuid, device);
	return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	if (uuid && device && strncmp(uuid, "MIG-", 4) == 0)
		return find_mig_device(uuid, device);
	return find_gpu(has_uuid, uuid, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_v1_t *uuid, nvmlDevice_t *device)
{
	enum { ASCII = 1, BINARY = 2 };
	char text[sizeof uuid->value.str + 1];
	REQUIRE_ARGUMENT(uuid && device);
	REQUIRE(uuid->version == NVML_VERSION_WORD(nvmlUUID_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	if (uuid->type == ASCII) {
		snprintf(text, sizeof text, "%.*s", (int)sizeof uuid->value.str, uuid->value.str);
	} else if (uuid->type == BINARY) {
		const unsigned char *b = uuid->value.bytes;
		snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
			 b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
	} else {
		return NVML_ERROR_INVALID_ARGUMENT;
	}
	return nvmlDeviceGetHandleByUUID(text, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	return find_gpu(has_serial, serial, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
	struct sim_pci_address address = { 0 };
	char extra;
	REQUIRE_ARGUMENT(bus_id);
	if (sscanf(bus_id, "%x:%x:%x.0%c", &address.domain, &address.bus, &address.device, &extra) != 3) {
		address.domain = 0;     /* the domain may be left out */
		REQUIRE_ARGUMENT(sscanf(bus_id, "%x:%x.0%c", &address.bus, &address.device, &extra) == 2);
	}
	return find_gpu(has_address, &address, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

/* ---- identity ---- */

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	TARGET(sim_nvml_target, device);
	return sim_nvml_copy_text(t.mig_device == SIM_WHOLE_GPU ? t.hardware->uuid : t.mig.devices[t.mig_device].uuid, uuid, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	TARGET(sim_nvml_target, device);
	if (t.mig_device == SIM_WHOLE_GPU)
		return sim_nvml_copy_text(t.hardware->name, name, length);
	const struct sim_compute_instance *ci = &t.mig.devices[t.mig_device];
	char profile[SIM_NAME_LEN], text[2 * SIM_NAME_LEN + 8];
	sim_mig_profile_name(t.hardware, sim_mig_profile_by_id(t.hardware, t.mig.gpu_instances[ci->gpu_instance_id].profile_id),
			     ci->compute_slices, profile, sizeof profile);
	snprintf(text, sizeof text, "%s MIG %s", t.hardware->name, profile);
	return sim_nvml_copy_text(text, name, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(index);
	const uint32_t *visible;
	uint32_t count = sim_nvml_visible_gpus(&visible);
	if (t.mig_device != SIM_WHOLE_GPU) {
		*index = (unsigned int)t.mig_device;
		return NVML_SUCCESS;
	}
	for (uint32_t i = 0; i < count; i++)
		if (visible[i] == t.index)
			*index = i;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
	TARGET(sim_nvml_gpu, device);
	return sim_nvml_copy_text(t.hardware->serial, serial, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *part, unsigned int length)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE(*t.hardware->board_part_number, NVML_ERROR_NOT_SUPPORTED);
	return sim_nvml_copy_text(t.hardware->board_part_number, part, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE(*t.hardware->vbios_version, NVML_ERROR_NOT_SUPPORTED);
	return sim_nvml_copy_text(t.hardware->vbios_version, version, length);
}

/* A query that answers one number about the hardware. */
#define NUMBER(function, resolve, type, expression)                      \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *value) \
	{                                                                \
		TARGET(resolve, device);                                 \
		REQUIRE_ARGUMENT(value);                                 \
		*value = (type)(expression);                             \
		return NVML_SUCCESS;                                     \
	}

NUMBER(nvmlDeviceGetMinorNumber, sim_nvml_gpu, unsigned int, t.hardware->minor)
NUMBER(nvmlDeviceGetModuleId, sim_nvml_gpu, unsigned int, t.hardware->minor + 1)
NUMBER(nvmlDeviceGetBrand, sim_nvml_target, nvmlBrandType_t, t.hardware->brand)
NUMBER(nvmlDeviceGetArchitecture, sim_nvml_target, nvmlDeviceArchitecture_t, t.hardware->architecture)
NUMBER(nvmlDeviceGetNumGpuCores, sim_nvml_gpu, unsigned int, t.hardware->core_count)
NUMBER(nvmlDeviceGetMemoryBusWidth, sim_nvml_gpu, unsigned int, t.hardware->memory_bus_bits)
NUMBER(nvmlDeviceGetBoardId, sim_nvml_gpu, unsigned int, t.hardware->pci.domain << 16 | t.hardware->pci.bus << 8)
NUMBER(nvmlDeviceGetMultiGpuBoard, sim_nvml_gpu, unsigned int, 0)
NUMBER(nvmlDeviceGetBusType, sim_nvml_gpu, unsigned int, NVML_BUS_TYPE_PCIE)
NUMBER(nvmlDeviceGetPowerSource, sim_nvml_gpu, unsigned int, NVML_POWER_SOURCE_AC)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, sim_nvml_gpu, unsigned int, t.hardware->pcie_generation)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, sim_nvml_gpu, unsigned int, t.hardware->pcie_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, sim_nvml_gpu, unsigned int, t.hardware->pcie_width)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, sim_nvml_gpu, unsigned int, t.hardware->pcie_generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, sim_nvml_gpu, unsigned int, t.hardware->pcie_width)
NUMBER(nvmlDeviceGetDisplayMode, sim_nvml_gpu, nvmlEnableState_t, NVML_FEATURE_DISABLED)
NUMBER(nvmlDeviceGetDisplayActive, sim_nvml_gpu, nvmlEnableState_t, NVML_FEATURE_DISABLED)
NUMBER(nvmlDeviceGetVirtualizationMode, sim_nvml_gpu, unsigned int, NVML_GPU_VIRTUALIZATION_MODE_NONE)
/* NVML's numbers for speeds are those of generations */
NUMBER(nvmlDeviceGetPcieLinkMaxSpeed, sim_nvml_gpu, unsigned int, t.hardware->pcie_generation)

/* MB/s of one lane, by PCIe generation; what the driver calls the link's speed. */
static unsigned lane_mbps(uint32_t generation)
{
	static const unsigned mbps[] = { 0, 2500, 5000, 8000, 16000, 32000, 64000 };
	return generation < sizeof mbps / sizeof *mbps ? mbps[generation] : 0;
}

NUMBER(nvmlDeviceGetPcieSpeed, sim_nvml_gpu, unsigned int, lane_mbps(t.hardware->pcie_generation))

/* The system processor of Turing and newer runs firmware that comes with the driver. */
NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
	TARGET(sim_nvml_gpu, device);
	return sim_nvml_copy_text(t.state->topology.driver_version, version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE);
}

NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *enabled, unsigned int *by_default)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(enabled && by_default);
	*enabled = *by_default = 1;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(major && minor);
	*major = (int)t.hardware->compute_major;
	*minor = (int)t.hardware->compute_minor;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t device, nvmlC2cModeInfo_v1_t *info)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	info->isC2cEnabled = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_v1_t *mode)
{
	enum { HMM = 1 };
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mode);
	REQUIRE(mode->version == NVML_VERSION_WORD(nvmlDeviceAddressingMode_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	mode->value = HMM;
	return NVML_SUCCESS;
}

/* ---- PCI ---- */

static void fill_pci(const struct sim_pci_address *address, uint32_t device_id, uint32_t subsystem_id, nvmlPciInfo_t *pci)
{
	memset(pci, 0, sizeof *pci);
	pci->domain = address->domain;
	pci->bus = address->bus;
	pci->device = address->device;
	pci->pciDeviceId = device_id;
	pci->pciSubSystemId = subsystem_id;
	sim_format_pci_address(address, pci->busId, sizeof pci->busId);
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", address->domain & 0xffff, address->bus & 0xff,
		 address->device & 0x1f);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(pci);
	fill_pci(&t.hardware->pci, t.hardware->pci_device_id, t.hardware->pci_subsystem_id, pci);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
	nvmlPciInfo_t full;
	REQUIRE_ARGUMENT(pci);
	nvmlReturn_t status = nvmlDeviceGetPciInfo_v3(device, &full);
	REQUIRE(status == NVML_SUCCESS, status);
	*pci = (nvmlPciInfo_v2_t){ .domain = full.domain,
				   .bus = full.bus,
				   .device = full.device,
				   .pciDeviceId = full.pciDeviceId,
				   .pciSubSystemId = full.pciSubSystemId };
	memcpy(pci->busId, full.busIdLegacy, sizeof pci->busId);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
	return nvmlDeviceGetPciInfo_v2(device, pci);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(pci);
	REQUIRE(pci->version == NVML_VERSION_WORD(nvmlPciInfoExt_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	nvmlPciInfo_t full;
	fill_pci(&t.hardware->pci, t.hardware->pci_device_id, t.hardware->pci_subsystem_id, &full);
	pci->domain = full.domain;
	pci->bus = full.bus;
	pci->device = full.device;
	pci->pciDeviceId = full.pciDeviceId;
	pci->pciSubSystemId = full.pciSubSystemId;
	pci->baseClass = PCI_CLASS_DISPLAY;
	pci->subClass = PCI_SUBCLASS_3D;
	memcpy(pci->busId, full.busId, sizeof pci->busId);
	return NVML_SUCCESS;
}

/* ---- settings ---- */

NVML_API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(mode);
	*mode = (nvmlComputeMode_t)atomic_load(&t.settings->compute_mode);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
	TARGET(sim_nvml_gpu, device);
	/* EXCLUSIVE_THREAD left the driver long ago. */
	REQUIRE_ARGUMENT(mode == NVML_COMPUTEMODE_DEFAULT || mode == NVML_COMPUTEMODE_PROHIBITED ||
			 mode == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	atomic_store(&t.settings->compute_mode, mode);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mode);
	*mode = atomic_load(&t.settings->persistence_off) ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mode == NVML_FEATURE_DISABLED || mode == NVML_FEATURE_ENABLED);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	atomic_store(&t.settings->persistence_off, mode == NVML_FEATURE_DISABLED);
	return NVML_SUCCESS;
}
