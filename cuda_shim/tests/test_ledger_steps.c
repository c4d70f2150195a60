/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of region/layout.h, looked at after every atomic step of the real code: charging, freeing, reaping, repairing, attaching.
 *
 * account/ledger.h and region/region.c are compiled into this program with a hook after each of their atomic operations on one device's
 * words (and on the states of slots). One process is stopped after its k-th step; meanwhile another does an operation, and may be killed
 * after its j-th; then the first continues, or is killed, there or a few steps later. Every k, every j, every pair.
 *
 * All of them are parts of this one program: a process is its own mapping and its own locks, and to kill it is to leave its code where it
 * stands and to close them. The model of tests/property/test_reserve_protocol.py has more interleavings; this has the code. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "region/region.h"
#include "tests/support.h"

static void step(const void *word);

static uint64_t look(const _Atomic uint64_t *word)
{
	uint64_t value = atomic_load(word);

	step(word);
	return value;
}

/* ---- the code under test, with its hook ------------------------------------------------------------------------- */

#define STEP(word, operation)                           \
	({                                              \
		__typeof__(operation) done = operation; \
		step(word);                             \
		done;                                   \
	})
#undef atomic_load
#undef atomic_store
#undef atomic_fetch_add
#undef atomic_fetch_sub
#undef atomic_compare_exchange_weak
#define atomic_load(word) STEP(word, atomic_load_explicit(word, memory_order_seq_cst))
#define atomic_store(word, value) (atomic_store_explicit(word, value, memory_order_seq_cst), step(word))
#define atomic_fetch_add(word, value) STEP(word, atomic_fetch_add_explicit(word, value, memory_order_seq_cst))
#define atomic_fetch_sub(word, value) STEP(word, atomic_fetch_sub_explicit(word, value, memory_order_seq_cst))
#define atomic_compare_exchange_weak(word, expected, value) \
	STEP(word, atomic_compare_exchange_weak_explicit(word, expected, value, memory_order_seq_cst, memory_order_seq_cst))

#pragma push_macro("atomic_load_explicit")
#undef atomic_load_explicit
#define atomic_load_explicit(word, order) look(word) /* the look at the judge before a charge */
#include "account/ledger.h"
#pragma pop_macro("atomic_load_explicit")

#include "region/region.c"

/* ---- processes ------------------------------------------------------------------------------------------------- */

#define LIMIT 5u
#define SLOTS 6u
#define DEVICE 0u
#define DIES_AFTER_MAX 5u
#define KILL_STEPS_MAX 60u /* one round of reaping and repairing, and a margin; a repair with changing counters tries again */

struct process {
	struct aq_region region;
	uint64_t held; /* what it was granted and still uses */
	unsigned steps, stops_at, dies_at; /* after which step; 0 = never */
	struct process *meanwhile;
	void (*meanwhile_does)(struct process *);
	struct process *outer;
	jmp_buf death;
};

static struct process owner, other, gone, newcomer;
static struct process *const everybody[] = { &owner, &other, &gone, &newcomer };
static struct process *running;
static struct aq_region watch;

static uint64_t line_now(void)
{
	return atomic_load_explicit(&aq_region_line(&watch, DEVICE)->used_bytes, memory_order_relaxed);
}

static uint64_t held_by_all(void)
{
	uint64_t held = 0;

	for (unsigned i = 0; i < sizeof(everybody) / sizeof(everybody[0]); i++)
		held += everybody[i]->held;
	return held;
}

static void check_contract(void)
{
	int64_t used = 0;

	for (uint32_t i = 0; i < SLOTS; i++) {
		struct aq_slot_device *slot = &aq_region_slot(&watch, i)->device[DEVICE];
		uint64_t charged = atomic_load_explicit(&slot->charged, memory_order_relaxed);
		uint64_t uncharged = atomic_load_explicit(&slot->uncharged, memory_order_relaxed);

		used += (int64_t)(charged - uncharged);
		CHECK(charged <= atomic_load_explicit(&slot->intended, memory_order_relaxed));
		CHECK(atomic_load_explicit(&slot->settled, memory_order_relaxed) <= uncharged);
	}
	CHECK((int64_t)line_now() >= used); /* (1) */
	CHECK(line_now() <= LIMIT);
	CHECK(held_by_all() <= line_now());
}

static bool is_watched(size_t offset)
{
	size_t in_slot = offset < AQ_REGION_SLOT_OFFSET ? 0 : (offset - AQ_REGION_SLOT_OFFSET) % sizeof(struct aq_region_slot);

	if (offset < AQ_REGION_SLOT_OFFSET)
		return offset == AQ_REGION_DEVICE_OFFSET + offsetof(struct aq_region_device, used_bytes);
	if (offset >= AQ_REGION_SLOT_OFFSET + SLOTS * sizeof(struct aq_region_slot))
		return false;
	return in_slot == offsetof(struct aq_region_slot, state) || (in_slot >= offsetof(struct aq_region_slot, device[DEVICE]) &&
								     in_slot <= offsetof(struct aq_region_slot, device[DEVICE].settled));
}

static void run(struct process *process, void (*does)(struct process *));

static void step(const void *word)
{
	struct process *process = running;

	if (!process || !is_watched((size_t)((const unsigned char *)word - process->region.base)))
		return;
	check_contract();
	if (++process->steps == process->stops_at && process->meanwhile)
		run(process->meanwhile, process->meanwhile_does);
	if (process->steps == process->dies_at)
		longjmp(process->death, 1);
}

static void die(struct process *process)
{
	aq_region_unmap(&process->region);
	process->held = 0;
}

static void run(struct process *process, void (*does)(struct process *))
{
	process->outer = running;
	process->steps = 0;
	running = process;
	if (setjmp(process->death) == 0)
		does(process);
	else
		die(running);
	running = running->outer;
}

/* ---- what they do ---------------------------------------------------------------------------------------------- */

static void charge(struct process *process)
{
	if (aq_ledger_charge(aq_region_line(&process->region, DEVICE), aq_region_mine(&process->region, DEVICE), 1, LIMIT))
		process->held++;
}

static void uncharge(struct process *process)
{
	process->held--; /* the memory itself is freed first */
	aq_ledger_uncharge(aq_region_line(&process->region, DEVICE), aq_region_mine(&process->region, DEVICE), 1);
}

static void reclaim(struct process *process)
{
	aq_region_reclaim(&process->region);
}

static void attach(struct process *process)
{
	struct aq_fault fault;

	CHECK(aq_region_map(&process->region, support_region(), AQ_REGION_WRITE, &fault) == 0);
	CHECK(aq_region_take_slot(&process->region, &fault) == 0);
}

static void leave_and_come_back(struct process *process)
{
	die(process);
	attach(process);
}

/* ---- every stop, every kill ------------------------------------------------------------------------------------- */

struct round {
	void (*first)(struct process *), (*second)(struct process *);
	unsigned first_stops_at, first_dies_after, second_dies_at; /* 0 = nowhere; after: 1 = where it stops */
	bool has_leak, is_empty; /* is_empty: the first holds nothing */
};

static void take_part(struct process *process, unsigned units)
{
	memset(process, 0, sizeof(*process));
	attach(process);
	for (; units; units--)
		charge(process);
}

/* One unit is left, so that two charges race for it. */
static void begin(const struct round *round)
{
	take_part(&gone, 1);
	take_part(&owner, round->is_empty ? 0 : 1);
	take_part(&other, LIMIT - 2 - round->has_leak - owner.held);
	die(&gone);
	if (round->has_leak)
		atomic_fetch_add_explicit(&aq_region_line(&watch, DEVICE)->used_bytes, 1, memory_order_relaxed);
	owner.stops_at = round->first_stops_at;
	owner.dies_at = round->first_dies_after ? round->first_stops_at + round->first_dies_after - 1 : 0;
	owner.meanwhile = round->second ? &other : NULL;
	owner.meanwhile_does = round->second;
	other.dies_at = round->second_dies_at;
}

/* The surviving parties go on, the line is the sum of what they hold, and all the rest can be charged. */
static void end(void)
{
	take_part(&newcomer, 0);
	reclaim(&newcomer);
	CHECK(line_now() == held_by_all());
	while (line_now() < LIMIT)
		charge(&newcomer);
	CHECK(held_by_all() == LIMIT);
	for (unsigned i = 0; i < sizeof(everybody) / sizeof(everybody[0]); i++)
		die(everybody[i]);
	take_part(&newcomer, 0);
	reclaim(&newcomer);
	CHECK(line_now() == 0);
	die(&newcomer);
}

/* True while there was such a step to stop at. */
static bool try_round(const struct round *round, bool *second_was_killed)
{
	begin(round);
	run(&owner, round->first);
	*second_was_killed = round->second_dies_at && other.steps >= round->second_dies_at;
	bool stopped = owner.steps >= round->first_stops_at;
	end();
	return stopped;
}

static bool is_long(void (*does)(struct process *))
{
	return does == reclaim || does == leave_and_come_back;
}

static unsigned try_all(struct round round)
{
	bool stopped = true, killed;
	unsigned rounds = 0;

	for (round.first_stops_at = 1; stopped; round.first_stops_at++) {
		round.second_dies_at = 0;
		stopped = try_round(&round, &killed);
		rounds++;
		if (!stopped || !round.second || round.first_dies_after > 1 || (is_long(round.first) && is_long(round.second)))
			continue; /* not two deaths apart, nor in two long ones: the second comes through */
		killed = true;
		for (round.second_dies_at = 1; killed && round.second_dies_at <= KILL_STEPS_MAX; round.second_dies_at++, rounds++)
			try_round(&round, &killed);
	}
	return rounds;
}

static unsigned try_pair(void (*first)(struct process *), void (*second)(struct process *))
{
	unsigned rounds = 0, dies_after_max = !second || is_long(first) ? 1 : DIES_AFTER_MAX;

	for (unsigned dies_after = 0; dies_after <= dies_after_max; dies_after++)
		for (unsigned world = 0; world < 4; world++)
			if (first != uncharge || !(world & 2))
				rounds += try_all((struct round){ .first = first,
								  .second = second,
								  .first_dies_after = dies_after,
								  .has_leak = world & 1,
								  .is_empty = world & 2 });
	return rounds;
}

/* A region of few slots, quick to map. */
static void shorten_region(void)
{
	uint32_t slots = SLOTS;
	int fd = open(support_region(), O_WRONLY | O_CLOEXEC);

	CHECK(pwrite(fd, &slots, sizeof(slots), offsetof(struct aq_region_header, slot_count)) == sizeof(slots));
	CHECK(ftruncate(fd, AQ_REGION_SLOT_OFFSET + SLOTS * sizeof(struct aq_region_slot)) == 0);
	CHECK(close(fd) == 0);
}

int main(void)
{
	static void (*const deeds[])(struct process *) = { charge, uncharge, reclaim, leave_and_come_back, NULL };
	struct aq_fault fault;
	unsigned rounds = 0;

	support_directory();
	support_write_region();
	shorten_region();
	CHECK(aq_region_map(&watch, support_region(), AQ_REGION_WRITE, &fault) == 0);
	for (unsigned first = 0; deeds[first]; first++)
		for (unsigned second = 0; second < sizeof(deeds) / sizeof(deeds[0]); second++)
			rounds += try_pair(deeds[first], deeds[second]);
	CHECK(rounds > 1000); /* the hook was there */
	aq_region_unmap(&watch);
	support_remove();
	return 0;
}
