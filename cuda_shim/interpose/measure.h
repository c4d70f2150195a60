/* What the driver itself says it has taken of a device, for memory that no call names: contexts and modules.
 *
 * NVML is asked, the driver's own library and never our front, and kept open once it was. */
#ifndef AQ_INTERPOSE_MEASURE_H
#define AQ_INTERPOSE_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

struct aq_sample_bytes {
	uint64_t own_bytes;    /* of the process whose slot it is; 0 when NVML does not list it (interpose/naming.h) */
	uint64_t device_bytes; /* of all processes */
};

/* Open NVML, unless it is open: before a lock is taken to measure under, for this may wait for the loader. False when there is none. */
bool aq_measure_open(void);

/* Both 0 when there is no NVML to ask. */
struct aq_sample_bytes aq_measure(const struct aq_region *region, const char *uuid, int device);
/* Bytes taken between two samples: by this process, or, when that cannot be told, by anyone. `is_own` says which. */
uint64_t aq_measured_growth(const struct aq_sample_bytes *before, const struct aq_sample_bytes *after, bool *is_own);

/* In a forked child. */
void aq_measure_forget(void);

#endif
