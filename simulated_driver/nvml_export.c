/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_export.c - the private table that nvidia-smi reads. The functions that it was seen to need are there; every other entry returns
 * NOT_SUPPORTED, which nvidia-smi shows as N/A. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "nvml_export_abi.h"
#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define TABLE_ENTRIES 256 /* nvidia-smi 535 uses the entries up to 243 */

static const void *table[TABLE_ENTRIES];

static nvmlReturn_t not_supported(void)
{
	return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t log_message(const char *format, ...)
{
	(void)format; /* the driver writes it to its own log file */
	return NVML_SUCCESS;
}

static nvmlReturn_t pcie_path(const char *first, const char *second, unsigned int *path)
{
	nvmlDevice_t a, b;
	nvmlGpuTopologyLevel_t level;
	REQUIRE_ARGUMENT(first && second && path);
	nvmlReturn_t status = nvmlDeviceGetHandleByPciBusId_v2(first, &a);
	if (status == NVML_SUCCESS)
		status = nvmlDeviceGetHandleByPciBusId_v2(second, &b);
	if (status == NVML_SUCCESS)
		status = nvmlDeviceGetTopologyCommonAncestor(a, b, &level);
	REQUIRE(status == NVML_SUCCESS, status);
	switch (level) {
	case NVML_TOPOLOGY_INTERNAL:
	case NVML_TOPOLOGY_SINGLE: *path = NVML_EXPORT_PATH_SINGLE; break;
	case NVML_TOPOLOGY_MULTIPLE: *path = NVML_EXPORT_PATH_MULTIPLE; break;
	case NVML_TOPOLOGY_HOSTBRIDGE: *path = NVML_EXPORT_PATH_HOSTBRIDGE; break;
	case NVML_TOPOLOGY_NODE: *path = NVML_EXPORT_PATH_NODE; break;
	default: *path = NVML_EXPORT_PATH_SYSTEM;
	}
	return NVML_SUCCESS;
}

typedef nvmlReturn_t (*list_t)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v3_t *infos);

/* A public list of processes, with their names. */
static nvmlReturn_t with_names(list_t list, nvmlDevice_t device, unsigned int *count, nvmlNamedProcess_t *processes)
{
	nvmlProcessInfo_v3_t infos[SIM_MAX_SLOTS];
	unsigned int found = SIM_MAX_SLOTS;
	REQUIRE_ARGUMENT(count && (processes || !*count));
	nvmlReturn_t status = list(device, &found, infos);
	REQUIRE(status == NVML_SUCCESS, status);
	unsigned int room = *count;
	*count = found;
	REQUIRE(found <= room, NVML_ERROR_INSUFFICIENT_SIZE);
	for (unsigned int i = 0; i < found; i++) {
		nvmlNamedProcess_t *process = &processes[i];
		process->pid = infos[i].pid;
		process->usedGpuMemory = infos[i].usedGpuMemory;
		process->gpuInstanceId = infos[i].gpuInstanceId;
		process->computeInstanceId = infos[i].computeInstanceId;
		process->usedGpuCcProtectedMemory = 0;
		if (nvmlSystemGetProcessName(infos[i].pid, process->name, sizeof process->name) != NVML_SUCCESS)
			process->name[0] = '\0'; /* it ended meanwhile */
	}
	return NVML_SUCCESS;
}

#define NAMED_LIST(function, list)                                                                       \
	static nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, nvmlNamedProcess_t *processes) \
	{                                                                                                \
		return with_names(list, device, count, processes);                                       \
	}

NAMED_LIST(compute_processes, nvmlDeviceGetComputeRunningProcesses_v3)
NAMED_LIST(graphics_processes, nvmlDeviceGetGraphicsRunningProcesses_v3)
NAMED_LIST(mps_processes, nvmlDeviceGetMPSComputeRunningProcesses_v3)

static void fill_table(void)
{
	for (size_t i = 1; i < TABLE_ENTRIES; i++)
		table[i] = (const void *)not_supported;
	table[NVML_EXPORT_SIZE] = (const void *)sizeof table; /* NOLINT(performance-no-int-to-ptr): the table's own form */
	table[NVML_EXPORT_PCIE_PATH] = (const void *)pcie_path;
	table[NVML_EXPORT_LOG] = (const void *)log_message;
	table[NVML_EXPORT_HANDLE_BY_INDEX] = (const void *)nvmlDeviceGetHandleByIndex_v2;
	table[NVML_EXPORT_COMPUTE_PROCESSES] = (const void *)compute_processes;
	table[NVML_EXPORT_GRAPHICS_PROCESSES] = (const void *)graphics_processes;
	table[NVML_EXPORT_MPS_PROCESSES] = (const void *)mps_processes;
}

/* It answers before nvmlInit too, as a lookup of symbols does. */
NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **out, const unsigned char *id)
{
	static const unsigned char wanted[NVML_EXPORT_ID_BYTES] = NVML_EXPORT_SMI;
	static pthread_once_t filled = PTHREAD_ONCE_INIT;
	REQUIRE_ARGUMENT(out && id);
	*out = NULL;
	REQUIRE(!memcmp(id, wanted, sizeof wanted), NVML_ERROR_NOT_FOUND);
	pthread_once(&filled, fill_table);
	*out = table;
	return NVML_SUCCESS;
}
