/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory as the driver reports it, for memory that no call names: contexts and modules.
 *
 * The source is NVML, the driver's own library and never the shim's front. Once opened, it stays open. */
#ifndef AQ_INTERPOSE_MEASURE_H
#define AQ_INTERPOSE_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

struct aq_sample_bytes {
	uint64_t own_bytes;    /* of the process that owns the slot; 0 when NVML does not list it (interpose/naming.h) */
	uint64_t device_bytes; /* of all processes */
};

/* Open NVML, unless it is open. Call this before taking a lock to measure under, because it may wait for the loader. False without NVML. */
bool aq_measure_open(void);

/* Both 0 without NVML. */
struct aq_sample_bytes aq_measure(const struct aq_region *region, const char *uuid, int device);
/* Bytes allocated between two samples: by this process, or by any process when the driver does not list this one. `is_own` says which. */
uint64_t aq_measured_growth(const struct aq_sample_bytes *before, const struct aq_sample_bytes *after, bool *is_own);

/* In a forked child. */
void aq_measure_forget(void);

#endif
