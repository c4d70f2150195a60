/* Whose pid is it that NVML names?
 *
 * Drivers differ. One names every process by its host pid. Another translates into the pid namespace of the caller where the process is
 * known there; its process lists leave the others out, but in utilisation samples those keep their host pids. So a number that is both a
 * pid in the container and a neighbour's on the host says nothing by itself: the driver's list of a device's processes, beside the
 * slots, tells. */
#ifndef AQ_INTERPOSE_NAMING_H
#define AQ_INTERPOSE_NAMING_H

#include "nvml_abi.h"
#include "region/region.h"

#define AQ_LISTED_MAX 512

/* What the driver lists of a device. */
struct aq_listed {
	bool known; /* false: it would not tell */
	unsigned int count;
	nvmlProcessInfo_v2_t process[AQ_LISTED_MAX];
};

struct aq_naming {
	const struct aq_region *region;
	const struct aq_listed *listed;
	bool translates;
};

/* How the driver names processes on a device of the limits. */
struct aq_naming aq_naming_of(const struct aq_region *region, uint32_t device, const struct aq_listed *listed);

/* The slot of the process that the driver names `pid`, -1 when it is none of the container's. */
int aq_naming_slot(const struct aq_naming *naming, unsigned int pid);

#endif
