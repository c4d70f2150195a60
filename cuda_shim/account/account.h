/* SPDX-License-Identifier: Apache-2.0 */
/* The accounts of this process: for each device of its limits, where to charge and up to what.
 *
 * Device numbers here are positions in the limits file (and the region), never CUDA ordinals. AQ_NO_DEVICE means a device that is
 * visible but not granted: every charge to it fails. */
#ifndef AQ_ACCOUNT_ACCOUNT_H
#define AQ_ACCOUNT_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

#include "region/limits.h"
#include "region/region.h"

#define AQ_NO_DEVICE (-1)

enum aq_kind {
	AQ_LINEAR = 0, /* without a counter of its own */
	AQ_MANAGED,
	AQ_POOL,
	AQ_ARRAY,
	AQ_CONTEXT,
	AQ_MODULE,
	AQ_VIRTUAL, /* managed memory of a container that oversubscribes: counted in the virtual ledger, not in the device's */
};

/* Begin to charge. Before a charge is refused, `reclaim` gives memory of a device back; true = some may be free now. */
void aq_account_open(struct aq_limits *limits, struct aq_region *region, bool (*reclaim)(int device));

/* The region that is charged in, with this process's slot. */
const struct aq_region *aq_account_region(void);

/* Charge, or count a refusal. A refusal changes nothing else. */
bool aq_charge(int device, enum aq_kind kind, uint64_t bytes);
/* Charge if it fits at once: no reclaiming, no refusal counted. */
bool aq_charge_quick(int device, enum aq_kind kind, uint64_t bytes);
/* Charge what the driver has taken already, past the limit if it must be. */
void aq_charge_taken(int device, enum aq_kind kind, uint64_t bytes);
void aq_uncharge(int device, enum aq_kind kind, uint64_t bytes);
/* Count a refusal that was decided elsewhere. */
void aq_refused(int device, uint64_t bytes);

/* May the container hold more than its device memory, as managed memory? */
bool aq_account_oversubscribed(int device);
/* Is all of the container's device memory used? */
bool aq_account_full(int device);
/* Is more than all of it in use? */
bool aq_account_over(int device);
/* What this process holds of a device, virtual memory included; and all processes of the container together. */
uint64_t aq_account_own_bytes(int device);
uint64_t aq_account_container_bytes(int device);

/* What the container may hold and what is left of it. */
struct aq_view {
	uint64_t total_bytes;
	uint64_t used_bytes;
	uint64_t free_bytes;
};
struct aq_view aq_account_view(int device, uint64_t physical_total, uint64_t physical_free);
/* Does another process of the container, dead or alive, hold memory of the device? */
bool aq_account_shared(int device);

uint64_t aq_account_context_bytes(int device);
void aq_account_learn_context_bytes(int device, uint64_t bytes);
void aq_account_contexts_add(int device, int count);

#endif
