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

typedef nvmlReturn_t (*aq_nvml_processes)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes);

enum aq_listed_as { AQ_LISTED_COMPUTE = 1, AQ_LISTED_MPS = 2 };

/* The processes that the driver lists of a device, each once: a client of MPS is in a list of its own, or in both with the same figures. */
struct aq_listed {
	bool known; /* false: it would not tell */
	unsigned int count;
	nvmlProcessInfo_v2_t process[AQ_LISTED_MAX];
	unsigned char as[AQ_LISTED_MAX]; /* enum aq_listed_as, or both */
};

/* Ask for both lists; either function may be NULL. */
void aq_listed_ask(struct aq_listed *listed, nvmlDevice_t device, aq_nvml_processes compute, aq_nvml_processes mps);

struct aq_naming {
	const struct aq_listed *listed;
	bool translates;
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

/* The slot of the living process that the driver names `pid`, -1 when it is none of the container's. */
int aq_naming_slot(const struct aq_naming *naming, unsigned int pid);

#endif
