/* SPDX-License-Identifier: Apache-2.0 */
/* To which process does a pid from NVML belong?
 *
 * Drivers differ. Some name every process by its host pid. Others translate into the caller's pid namespace where the process is visible
 * there: their process lists leave other processes out, but their utilisation samples give those with host pids. So a number may be a pid
 * in the container and also a neighbour's host pid. Only the driver's list of a device's processes, together with the slots, can decide. */
#ifndef AQ_INTERPOSE_NAMING_H
#define AQ_INTERPOSE_NAMING_H

#include "nvml_abi.h"
#include "region/region.h"

#define AQ_LISTED_MAX 512

typedef nvmlReturn_t (*aq_nvml_processes)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes);

enum aq_listed_as { AQ_LISTED_COMPUTE = 1, AQ_LISTED_MPS = 2 };

/* The processes that the driver lists for a device, each once. An MPS client is in a list of its own, or in both with the same figures. */
struct aq_listed {
	bool known; /* false: the driver did not answer */
	unsigned int count;
	nvmlProcessInfo_v2_t process[AQ_LISTED_MAX];
	unsigned char as[AQ_LISTED_MAX]; /* enum aq_listed_as, or both */
};

/* Ask for both lists; either function may be NULL. */
void aq_listed_query(struct aq_listed *listed, nvmlDevice_t device, aq_nvml_processes compute, aq_nvml_processes mps);

struct aq_naming {
	const struct aq_listed *listed;
	bool translates;
	bool names_own; /* the driver lists a process of the container by its pid in the caller's namespace */
	uint32_t count;
	struct {
		uint32_t slot;
		uint32_t pid;      /* in the caller's pid namespace; 0 = not to be seen there */
		uint32_t host_pid; /* 0 = the agent has not found it yet */
		unsigned int as;   /* in which of the driver's lists it is, as `as` above; 0 = the driver does not name it */
	} living[AQ_SLOT_COUNT];
};

/* How the driver names processes on a device of the limits. Two system calls for each process of the container. */
void aq_naming_learn(struct aq_naming *naming, const struct aq_region *region, uint32_t device, const struct aq_listed *listed);

/* How the driver names the last owner of a slot, which has ended; 0 = not known. For a process with a slot of its own: the pid that the
 * other one left is one here only if both were of one pid namespace. */
uint32_t aq_naming_ended(const struct aq_naming *naming, const struct aq_region *region, uint32_t index);
bool aq_naming_lists(const struct aq_naming *naming, unsigned int pid);

/* The slot of the running process that the driver names `pid`; -1 when it is not one of the container's. */
int aq_naming_slot(const struct aq_naming *naming, unsigned int pid);

#endif
