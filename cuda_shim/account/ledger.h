/* SPDX-License-Identifier: Apache-2.0 */
/* Charging bytes: the three steps of the contract in region/layout.h. Lock-free, no system call, any number of processes and threads. */
#ifndef AQ_ACCOUNT_LEDGER_H
#define AQ_ACCOUNT_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "region/layout.h"

/* The four counters of a slot, as they begin struct aq_slot_device and struct aq_virtual_device. */
struct aq_counters {
	_Atomic uint64_t intended, charged, uncharged, settled;
};

_Static_assert(offsetof(struct aq_slot_device, intended) == 0 && offsetof(struct aq_slot_device, charged) == 8 &&
		       offsetof(struct aq_slot_device, uncharged) == 16 && offsetof(struct aq_slot_device, settled) == 24,
	       "struct aq_counters");
_Static_assert(offsetof(struct aq_virtual_device, intended) == 0 && offsetof(struct aq_virtual_device, charged) == 8 &&
		       offsetof(struct aq_virtual_device, uncharged) == 16 && offsetof(struct aq_virtual_device, settled) == 24,
	       "struct aq_counters");

static inline struct aq_counters *aq_counters_of_device(struct aq_slot_device *device)
{
	return (struct aq_counters *)(void *)device;
}

static inline struct aq_counters *aq_counters_of_virtual(struct aq_virtual_device *ledger)
{
	return (struct aq_counters *)(void *)ledger;
}

/* Charge `bytes` unless the judge would pass `limit`. The compare and the add are one step, so a refused charge is never visible to
 * others. */
static inline bool aq_counters_charge(_Atomic uint64_t *judge, struct aq_counters *mine, uint64_t bytes, uint64_t limit)
{
	uint64_t used = atomic_load_explicit(judge, memory_order_relaxed);

	if (bytes > limit || used > limit - bytes)
		return false;
	atomic_fetch_add(&mine->intended, bytes);
	while (!atomic_compare_exchange_weak(judge, &used, used + bytes)) {
		if (used > limit - bytes) {
			atomic_fetch_add(&mine->uncharged, bytes);
			atomic_fetch_add(&mine->charged, bytes);
			atomic_fetch_add(&mine->settled, bytes);
			return false;
		}
	}
	atomic_fetch_add(&mine->charged, bytes);
	return true;
}

static inline void aq_counters_uncharge(_Atomic uint64_t *judge, struct aq_counters *mine, uint64_t bytes)
{
	atomic_fetch_add(&mine->uncharged, bytes);
	atomic_fetch_sub(judge, bytes);
	atomic_fetch_add(&mine->settled, bytes);
}

/* The ledger of device memory. */
static inline bool aq_ledger_charge(struct aq_region_device *line, struct aq_slot_device *mine, uint64_t bytes, uint64_t limit)
{
	return aq_counters_charge(&line->used_bytes, aq_counters_of_device(mine), bytes, limit);
}

static inline void aq_ledger_uncharge(struct aq_region_device *line, struct aq_slot_device *mine, uint64_t bytes)
{
	aq_counters_uncharge(&line->used_bytes, aq_counters_of_device(mine), bytes);
}

#endif
