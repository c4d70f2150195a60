/* What a context costs: device memory taken around its making, asked of NVML. Used only where neither the agent nor an earlier process knows. */
#ifndef AQ_INTERPOSE_CONTEXT_COST_H
#define AQ_INTERPOSE_CONTEXT_COST_H

#include <stdint.h>

struct aq_cost_sample {
	uint64_t own_bytes;    /* of this process, 0 when NVML does not list it (its pids may be another namespace's) */
	uint64_t device_bytes; /* of all processes */
};

void aq_cost_sample(const char *uuid, struct aq_cost_sample *sample);
/* Bytes taken since `before`: by this process, or, when that cannot be told, by anyone. 0 when there is no NVML to ask. */
uint64_t aq_cost_since(const char *uuid, const struct aq_cost_sample *before);

#endif
