/* SPDX-License-Identifier: Apache-2.0 */
/* The private table of NVML that nvidia-smi asks for, as far as nvidia-smi 535.261.03 was seen to use it.
 *
 * No header declares it. Numbers, arguments and layouts come from running nvidia-smi on a table that logs each call, and from what it
 * prints for values put there. The table belongs to a display tool; nothing in it checks a licence or the integrity of a library. */
#ifndef AQ_NVML_EXPORT_ABI_H
#define AQ_NVML_EXPORT_ABI_H

#include "nvml_abi.h"

#define NVML_EXPORT_ID_BYTES   16
#define NVML_EXPORT_NAME_BYTES 4096

/* {6c3efec4-8fc9-4e6c-a327-ee696e12f7c4}, as it lies in memory */
#define NVML_EXPORT_SMI                                                                                           \
	{                                                                                                         \
		0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4    \
	}

/* Entry 0 is the size of the table in bytes, as in the tables of CUDA; the others are functions. */
enum {
	NVML_EXPORT_SIZE = 0,
	NVML_EXPORT_PCIE_PATH = 23,          /* (const char *bus_id, const char *bus_id, unsigned int *path) */
	NVML_EXPORT_LOG = 26,                /* (const char *format, ...) */
	NVML_EXPORT_HANDLE_BY_INDEX = 81,    /* (unsigned int index, nvmlDevice_t *device) */
	NVML_EXPORT_COMPUTE_PROCESSES = 213, /* (nvmlDevice_t device, unsigned int *count, nvmlNamedProcess_t *processes) */
	NVML_EXPORT_GRAPHICS_PROCESSES = 214,
	NVML_EXPORT_MPS_PROCESSES = 215,
};

/* Values of NVML_EXPORT_PCIE_PATH, as topo -m prints them: PIX, PXB, PHB, NODE, SYS. */
enum { NVML_EXPORT_PATH_SINGLE, NVML_EXPORT_PATH_MULTIPLE, NVML_EXPORT_PATH_HOSTBRIDGE, NVML_EXPORT_PATH_NODE, NVML_EXPORT_PATH_SYSTEM };

/* An entry of the process lists: nvmlProcessInfo_v2_t, protected memory, and the path of the program. */
typedef struct {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId, computeInstanceId;
	unsigned long long usedGpuCcProtectedMemory;
	char name[NVML_EXPORT_NAME_BYTES];
} nvmlNamedProcess_t;

_Static_assert(sizeof(nvmlNamedProcess_t) == 4128, "nvmlNamedProcess_t");

#endif
