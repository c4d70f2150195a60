/* SPDX-License-Identifier: Apache-2.0 */
/* The real NVML, for the shim's own queries. Opened at the first query: most processes never make one. */
#ifndef AQ_INTERPOSE_DRIVER_NVML_H
#define AQ_INTERPOSE_DRIVER_NVML_H

#include <stdbool.h>

#include "nvml_abi.h"

struct aq_driver_nvml {
	nvmlReturn_t (*init)(void);
	nvmlReturn_t (*shutdown)(void);
	nvmlReturn_t (*by_uuid)(const char *, nvmlDevice_t *);
	nvmlReturn_t (*memory)(nvmlDevice_t, nvmlMemory_t *);
	nvmlReturn_t (*processes)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v2_t *);                                 /* may be NULL */
	nvmlReturn_t (*mps_processes)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v2_t *);                             /* may be NULL */
	nvmlReturn_t (*utilization)(nvmlDevice_t, nvmlProcessUtilizationSample_t *, unsigned int *, unsigned long long); /* may be NULL */
};

/* False when there is no NVML. The caller initialises it. */
bool aq_driver_nvml_load(struct aq_driver_nvml *nvml);

#endif
