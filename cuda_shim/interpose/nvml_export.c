/* SPDX-License-Identifier: Apache-2.0 */
/* The private table of nvidia-smi, as the container may use it.
 *
 * Through it nvidia-smi reads process lists past every function that has a name. The container gets a table of its own: the lists are those
 * of its own processes, the entries known to be harmless are the driver's, and every other entry returns NVML_ERROR_NOT_SUPPORTED. A newer
 * nvidia-smi may use an entry that is not known here; it then shows N/A. */
#include <stdint.h>
#include <string.h>

#include "early.h"
#include "interpose/nvml.h"
#include "nvml_export_abi.h"

#define MOST_ENTRIES 4096 /* nvidia-smi 535 uses the entries up to 243 */

static const void *own_table[MOST_ENTRIES];

static nvmlReturn_t not_supported(void)
{
	return NVML_ERROR_NOT_SUPPORTED;
}

/* The driver judges the device, as for the public list of the same name. */
static nvmlReturn_t judge(nvmlDevice_t device, const unsigned int *count, const void *processes)
{
	unsigned int none = 0;

	if (!count || (*count && !processes))
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &none, NULL);
	return result == NVML_ERROR_INSUFFICIENT_SIZE ? NVML_SUCCESS : result;
}

static nvmlReturn_t list_named(nvmlDevice_t device, enum aq_listed_as wanted, unsigned int *count, nvmlNamedProcess_t *processes)
{
	nvmlReturn_t result = judge(device, count, processes);

	if (result == NVML_SUCCESS)
		result = aq_nvml_list(device, wanted, count, processes, sizeof(*processes));
	for (unsigned int i = 0; result == NVML_SUCCESS && i < *count; i++) {
		processes[i].usedGpuCcProtectedMemory = 0;
		if (aq_nvml.nvmlSystemGetProcessName(processes[i].pid, processes[i].name, sizeof(processes[i].name)) != NVML_SUCCESS)
			processes[i].name[0] = '\0';
	}
	return result;
}

static nvmlReturn_t compute_processes(nvmlDevice_t device, unsigned int *count, nvmlNamedProcess_t *processes)
{
	return list_named(device, AQ_LISTED_COMPUTE, count, processes);
}

static nvmlReturn_t mps_processes(nvmlDevice_t device, unsigned int *count, nvmlNamedProcess_t *processes)
{
	return list_named(device, AQ_LISTED_MPS, count, processes);
}

/* Slots are taken by CUDA, so the list of graphics has no process of the container to show. */
static nvmlReturn_t graphics_processes(nvmlDevice_t device, unsigned int *count, nvmlNamedProcess_t *processes)
{
	nvmlReturn_t result = judge(device, count, processes);

	if (result == NVML_SUCCESS)
		*count = 0;
	return result;
}

static const struct {
	unsigned int at;
	const void *function; /* NULL: the driver's */
} known[] = {
	{ NVML_EXPORT_PCIE_PATH, NULL },
	{ NVML_EXPORT_LOG, NULL },
	{ NVML_EXPORT_HANDLE_BY_INDEX, NULL },
	{ NVML_EXPORT_COMPUTE_PROCESSES, (const void *)compute_processes },
	{ NVML_EXPORT_GRAPHICS_PROCESSES, (const void *)graphics_processes },
	{ NVML_EXPORT_MPS_PROCESSES, (const void *)mps_processes },
};

/* How many entries of the driver's table may be read. A driver with something else than a size in entry 0 has those that are known. */
static size_t entries_of(const void *const *driver)
{
	size_t size = (uintptr_t)driver[NVML_EXPORT_SIZE];

	return size <= sizeof(own_table) ? size / sizeof(void *) : NVML_EXPORT_MPS_PROCESSES + 1;
}

static void fill_locked(const void *const *driver)
{
	size_t entries = entries_of(driver);

	for (size_t i = 1; i < MOST_ENTRIES; i++)
		own_table[i] = (const void *)not_supported;
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (known[i].at < entries)
			own_table[known[i].at] = known[i].function ? known[i].function : driver[known[i].at];
	own_table[NVML_EXPORT_SIZE] = driver[NVML_EXPORT_SIZE];
}

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const unsigned char *id)
{
	static const unsigned char smi[NVML_EXPORT_ID_BYTES] = NVML_EXPORT_SMI;
	static bool filled;
	const void *driver = NULL;

	AQ_NVML_LIMITED_OR_RETURN(nvmlInternalGetExportTable(table, id));
	if (!table || !id)
		return NVML_ERROR_INVALID_ARGUMENT;
	*table = NULL;
	if (memcmp(id, smi, sizeof(smi)) != 0)
		return NVML_ERROR_NOT_SUPPORTED; /* what another table does is not known */
	nvmlReturn_t result = aq_nvml.nvmlInternalGetExportTable(&driver, id);
	if (result != NVML_SUCCESS || !driver)
		return result;
	aq_early_enter();
	if (!filled)
		fill_locked(driver);
	filled = true;
	aq_early_leave();
	*table = own_table;
	return NVML_SUCCESS;
}
