/* What this process holds, by address or handle, so that whichever call frees it credits exactly what was charged. */
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

/* The driver gave out an address that the map still has: what lay there was freed past us. Credit it. */
void aq_freed_past_us(const struct aq_entry *stale);

/* Charge an allocation of `*bytes` with what the device loses by it, and tell how much that was. Where only the last page does not fit, what was
 * asked for is charged: a program may take all that is free, to the byte. Counts a refusal. */
static inline bool aq_charge_lost(int device, enum aq_kind kind, uint64_t *bytes)
{
	uint64_t asked = *bytes;

	*bytes = aq_lost_bytes(asked);
	if (__builtin_expect(aq_charge_quick(device, kind, *bytes), 1))
		return true;
	*bytes = aq_whole_bytes(asked, AQ_UNIT_BYTES);
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
		aq_freed_past_us(&stale);
	return true;
}

/* After the driver was asked to free `held`, already taken from `map`: credit it, or put it back when the driver refused. */
static inline void aq_freed(struct aq_map *map, CUresult result, const struct aq_entry *held)
{
	if (result == CUDA_SUCCESS)
		aq_uncharge((int)held->device, (enum aq_kind)held->kind, held->bytes);
	else
		aq_map_put(map, held);
}

/* Around the destruction of an array or mipmapped array: take the physical memory that was mapped to it out of the books, for its address may be
 * used again at once; then let go of it, or put it back when the driver refused. */
struct aq_tile;
struct aq_tile *aq_vmm_array_ending(uint64_t array);
void aq_vmm_array_ended(uint64_t array, struct aq_tile *tiles, CUresult result);

/* A context is gone: credit what lived in it. `owner` as in struct aq_place. */
void aq_allocations_drop(int device, uint64_t owner);

/* In a forked child. */
void aq_allocations_forget(void);
void aq_vmm_forget(void);
void aq_graphs_forget(void);

#endif
