/* Charging bytes: the three steps of the contract in region/layout.h. Lock-free, no system call, any number of processes and threads. */
#ifndef AQ_ACCOUNT_LEDGER_H
#define AQ_ACCOUNT_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "region/layout.h"

/* Charge `bytes` unless the line would pass `limit`. The compare and the add are one step, so a refused charge is never visible to others. */
static inline bool aq_ledger_charge(struct aq_region_device *line, struct aq_slot_device *mine, uint64_t bytes, uint64_t limit)
{
	uint64_t used = atomic_load_explicit(&line->used_bytes, memory_order_relaxed);

	if (bytes > limit || used > limit - bytes)
		return false;
	atomic_fetch_add(&mine->intended, bytes);
	while (!atomic_compare_exchange_weak(&line->used_bytes, &used, used + bytes)) {
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

static inline void aq_ledger_uncharge(struct aq_region_device *line, struct aq_slot_device *mine, uint64_t bytes)
{
	atomic_fetch_add(&mine->uncharged, bytes);
	atomic_fetch_sub(&line->used_bytes, bytes);
	atomic_fetch_add(&mine->settled, bytes);
}

#endif
