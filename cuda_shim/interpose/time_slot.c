/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/time_slot.h"

#include <string.h>
#include <sys/auxv.h>

#include "interpose/driver.h"
#include "interpose/neighbours.h"
#include "interpose/pacer.h"
#include "interpose/prefetch.h"
#include "interpose/sample.h"
#include "log.h"

static struct slot {
	_Atomic uint64_t capacity_bytes; /* of the device; 0 = not queried yet */
	_Atomic int64_t without_until_ns; /* the container's time slot did not come: it runs without one */
	_Atomic uint64_t turn;         /* the container's time slot now, as of the last query; 0 = no slot */
	_Atomic uint64_t fetched_turn; /* this process's memory was prefetched at the start of this time slot */
} slots[AQ_MAX_DEVICES];

/* The identity of the container, for all its processes, on the page of time slots. */
static uint64_t turns_owner(void)
{
	struct aq_region_header *header = (struct aq_region_header *)(void *)aq_limited->region.base;
	uint64_t owner = atomic_load_explicit(&header->turns_owner, memory_order_relaxed), made;

	if (__builtin_expect(owner != 0, 1))
		return owner;
	memcpy(&made, (const void *)getauxval(AT_RANDOM), sizeof(made)); /* the kernel gives each program sixteen random bytes */
	made |= 1;
	return atomic_compare_exchange_strong(&header->turns_owner, &owner, made) ? made : owner;
}

/* Query the container's time slot. Only memory beyond the guarantee makes others lose pages: without such memory there is no need to
 * query. */
static struct aq_turns_reply query_time_slot(int device, int64_t now)
{
	uint32_t line = aq_ceiling_turns(&aq_limited->limits.device[device]);
	struct aq_region_device *held = aq_region_line(&aq_limited->region, (uint32_t)device);
	uint64_t beyond = atomic_load_explicit(&held->virtual_bytes, memory_order_relaxed);

	if (__builtin_expect(!line || !beyond, 1))
		return (struct aq_turns_reply){ .may_run = true };
	return aq_neighbours_turn(&aq_limited->node.turns, line,
				  &(struct aq_turns_party){
				      .owner = turns_owner(),
				      .demand_bytes = beyond + atomic_load_explicit(&held->used_bytes, memory_order_relaxed),
				      .capacity_bytes = atomic_load_explicit(&slots[device].capacity_bytes, memory_order_relaxed),
				  },
				  now);
}

bool aq_time_slot_wait(struct aq_wait *wait)
{
	int device = wait->device;
	struct slot *slot = &slots[device];
	int64_t now = aq_now_ns(), waiting_since = now;
	struct aq_turns_reply reply = query_time_slot(device, now);

	if (__builtin_expect(reply.may_run, 1)) {
		atomic_store_explicit(&slot->turn, reply.turn, memory_order_relaxed);
		return false;
	}
	if (now < atomic_load_explicit(&slot->without_until_ns, memory_order_relaxed))
		return false;
	aq_wait_begin(wait, now);
	while (!reply.may_run) {
		aq_samples_look(device);
		if (now - waiting_since > reply.patience_ns) {
			aq_log_warn("device %s: no time slot for this container in %lld ms; it continues without one",
				    aq_limited->limits.device[device].uuid_text, (long long)(reply.patience_ns / 1000000));
			atomic_store_explicit(&slot->without_until_ns, now + AQ_TURNS_LEAST_NS, memory_order_relaxed);
			break;
		}
		aq_nap(reply.retry_ns);
		aq_ceilings_look();
		now = aq_now_ns();
		reply = query_time_slot(device, now);
	}
	return true;
}

/* What may be brought to the device at the start of a time slot: all that this process may have there, less what cannot leave it and what
 * its siblings want there. */
static uint64_t room_for_virtual(int device)
{
	struct aq_region_device *held = aq_region_line(&aq_limited->region, (uint32_t)device);
	uint64_t capacity = atomic_load_explicit(&slots[device].capacity_bytes, memory_order_relaxed);
	uint64_t mine = aq_virtual_used_bytes(
		aq_region_virtual(&aq_limited->region, (uint32_t)aq_limited->region.slot_index, (uint32_t)device));
	uint64_t all = atomic_load_explicit(&held->used_bytes, memory_order_relaxed) +
		       atomic_load_explicit(&held->virtual_bytes, memory_order_relaxed);
	uint64_t others = all > mine ? all - mine : 0;

	return capacity > others ? capacity - others : 0;
}

void aq_time_slot_prefetch(const struct aq_place *place, const struct aq_work *work)
{
	struct slot *slot = &slots[place->device];
	uint64_t turn = atomic_load_explicit(&slot->turn, memory_order_relaxed);
	uint64_t fetched = atomic_load_explicit(&slot->fetched_turn, memory_order_relaxed);

	if (__builtin_expect(!turn || turn == fetched, 1))
		return;
	if (atomic_compare_exchange_strong(&slot->fetched_turn, &fetched, turn))
		aq_prefetch(place, work->stream, work->per_thread, room_for_virtual(place->device));
}

void aq_time_slot_learn_capacity(const struct aq_place *place)
{
	size_t bytes = 0;

	if (__builtin_expect(atomic_load_explicit(&slots[place->device].capacity_bytes, memory_order_relaxed) != 0, 1))
		return;
	if (aq_cuda.cuDeviceTotalMem_v2(&bytes, place->ordinal) != CUDA_SUCCESS || !bytes)
		bytes = SIZE_MAX; /* what is not known is not oversubscribed */
	atomic_store_explicit(&slots[place->device].capacity_bytes, bytes, memory_order_relaxed);
}

void aq_time_slots_forget(void)
{
	for (unsigned i = 0; i < AQ_MAX_DEVICES; i++) {
		atomic_store(&slots[i].turn, 0);
		atomic_store(&slots[i].fetched_turn, 0);
	}
}
