/* SPDX-License-Identifier: Apache-2.0 */
/* What this process holds, by address or handle, so that any call that frees it uncharges exactly what was charged. */
#ifndef AQ_INTERPOSE_ALLOCATIONS_H
#define AQ_INTERPOSE_ALLOCATIONS_H

#include "account/account.h"
#include "account/map.h"
#include "cuda_abi.h"
#include "interpose/context.h"
#include "limit/memory.h"

/* Linear memory by address. Pool memory is in it too, with AQ_POOL and its reservoir as owner; its bytes are the pool's to count. */
extern struct aq_map aq_pointers;
/* Arrays and mipmapped arrays by handle. */
extern struct aq_map aq_arrays;

/* The driver returned an address that is still in the map. So the old allocation there was freed without the shim: uncharge it. */
void aq_drop_stale(const struct aq_entry *stale);

/* Charge an allocation of `*bytes` with its footprint on the device, and return that in `*bytes`. Where only the last page does not fit,
 * charge the request instead: a program may use all free memory, to the byte. Counts a refusal. */
static inline bool aq_charge_footprint(int device, enum aq_kind kind, uint64_t *bytes)
{
	uint64_t requested = *bytes;

	*bytes = aq_footprint_bytes(requested);
	if (__builtin_expect(aq_charge_quick(device, kind, *bytes), 1))
		return true;
	*bytes = aq_whole_bytes(requested, AQ_UNIT_BYTES);
	return aq_charge(device, kind, *bytes);
}

/* Remember a charged allocation. When there is no memory to remember it, false. */
static inline bool aq_record(struct aq_map *map, uint64_t key, uint64_t bytes, enum aq_kind kind, const struct aq_place *place)
{
	struct aq_entry entry = { .key = key, .bytes = bytes, .owner = place->owner, .device = (uint32_t)place->device, .kind = kind };
	struct aq_entry stale = { .key = 0 };

	if (!aq_map_replace(map, &entry, &stale))
		return false;
	if (__builtin_expect(stale.key != 0, 0))
		aq_drop_stale(&stale);
	return true;
}

/* After a call to the driver that frees `held`, already taken from `map`: uncharge it, or put it back when the driver refused. */
void aq_freed(struct aq_map *map, CUresult result, const struct aq_entry *held);

/* A context has ended: uncharge what it owned. `owner` as in struct aq_place. */
void aq_allocations_context_gone(int device, uint64_t owner);

/* In a forked child. */
void aq_allocations_forget(void);

#endif
