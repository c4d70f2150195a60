/* SPDX-License-Identifier: Apache-2.0 */
/* Time slots on an oversubscribed device, with time as an argument: which container may run when, for any number of seconds. */
#include <string.h>

#include "limit/turns.h"
#include "tests/support.h"

#define MS 1000000ll
#define SECOND 1000000000ll
#define GIB (1024 * MIB)
#define PARTIES 4

static struct aq_turns_line line;

static struct party {
	struct aq_turns_party asks;
	bool works;
	int64_t ran_ns, longest_wait_ns, waits_since;
} parties[PARTIES];

static void fresh(void)
{
	memset(&line, 0, sizeof line);
	memset(parties, 0, sizeof parties);
	for (uint64_t i = 0; i < PARTIES; i++)
		parties[i].asks = (struct aq_turns_party){ .owner = 100 + i, .demand_bytes = 10 * GIB, .capacity_bytes = 16 * GIB };
}

/* All active containers query every millisecond. Returns the most that ran in the same millisecond. */
static unsigned play(int64_t *now, int64_t length_ns)
{
	unsigned most = 0;

	for (int64_t end = *now + length_ns; *now < end; *now += MS) {
		unsigned running = 0;

		for (unsigned i = 0; i < PARTIES; i++) {
			struct party *party = &parties[i];

			if (!party->works)
				continue;
			struct aq_turns_reply answer = aq_turns_query(&line, &party->asks, *now);
			if (answer.may_run) {
				running++;
				party->ran_ns += MS;
				party->waits_since = 0;
			} else {
				CHECK(answer.retry_ns > 0 && answer.retry_ns <= AQ_TURNS_MOST_NS && answer.patience_ns >= AQ_TURNS_MOST_NS);
				party->waits_since = party->waits_since ? party->waits_since : *now;
			}
			int64_t waits = party->waits_since ? *now - party->waits_since : 0;
			party->longest_wait_ns = waits > party->longest_wait_ns ? waits : party->longest_wait_ns;
		}
		most = running > most ? running : most;
	}
	return most;
}

static void what_fits_together_runs_together(void)
{
	int64_t now = SECOND;

	fresh();
	for (unsigned i = 0; i < PARTIES; i++) {
		parties[i].asks.demand_bytes = 4 * GIB;
		parties[i].works = true;
	}
	CHECK(play(&now, 5 * SECOND) == PARTIES);
	for (unsigned i = 0; i < PARTIES; i++)
		CHECK(parties[i].ran_ns == 5 * SECOND);
}

static void what_does_not_fit_runs_one_at_a_time_and_all_alike(void)
{
	int64_t now = SECOND;

	fresh();
	parties[0].works = parties[1].works = parties[3].works = true;
	play(&now, 5 * MS); /* before all have written what they hold, more than one may begin */
	CHECK(play(&now, 300 * SECOND) == 1);
	for (unsigned i = 0; i < PARTIES; i++)
		CHECK(i == 2 ? !parties[i].ran_ns : parties[i].ran_ns > 85 * SECOND && parties[i].ran_ns < 115 * SECOND);
}

static void time_slot_is_long_against_the_change_of_memory(void)
{
	int64_t now = SECOND;

	fresh();
	parties[0].works = parties[1].works = true; /* 4 GiB too much: 0.17 s over the bus, ten times that is less than the least */
	play(&now, 60 * SECOND);
	CHECK(parties[0].longest_wait_ns >= AQ_TURNS_LEAST_NS - 10 * MS && parties[0].longest_wait_ns < AQ_TURNS_LEAST_NS + 50 * MS);
	fresh();
	parties[0].works = parties[1].works = true;
	parties[0].asks.demand_bytes = parties[1].asks.demand_bytes = 16 * GIB;
	play(&now, 120 * SECOND);
	CHECK(parties[0].longest_wait_ns > 6 * SECOND && parties[0].longest_wait_ns < 8 * SECOND);
	fresh();
	parties[0].works = parties[1].works = true;
	parties[0].asks.demand_bytes = parties[1].asks.demand_bytes = UINT64_MAX; /* nonsense is a long turn, not an endless one */
	play(&now, 300 * SECOND);
	CHECK(parties[0].longest_wait_ns <= AQ_TURNS_MOST_NS + SECOND && parties[0].ran_ns > 100 * SECOND);
}

static void time_slots_have_distinct_numbers_and_a_lone_container_has_none(void)
{
	uint64_t last[2] = { 0, 0 };
	unsigned changes[2] = { 0, 0 };

	fresh();
	CHECK(aq_turns_query(&line, &parties[0].asks, SECOND).turn == 0); /* fits */
	parties[0].asks.demand_bytes = 20 * GIB;
	CHECK(aq_turns_query(&line, &parties[0].asks, SECOND).turn == 0); /* does not, but there is no other */
	fresh();
	for (int64_t now = SECOND; now < 60 * SECOND; now += MS)
		for (unsigned i = 0; i < 2; i++) {
			struct aq_turns_reply answer = aq_turns_query(&line, &parties[i].asks, now);

			if (answer.may_run && answer.turn && answer.turn != last[i]) {
				CHECK(answer.turn > last[i] && answer.turn != last[!i]);
				last[i] = answer.turn;
				changes[i]++;
			}
		}
	CHECK(changes[0] > 10 && changes[0] < 20 && changes[1] > 10 && changes[1] < 20); /* of 2 s each, in turns */
}

static void inactive_or_killed_container_is_skipped(void)
{
	int64_t now = SECOND;

	fresh();
	parties[0].works = parties[1].works = true;
	play(&now, 10 * SECOND);
	parties[0].works = false; /* perhaps within its turn */
	int64_t before = parties[1].ran_ns;
	play(&now, 10 * SECOND);
	CHECK(parties[1].ran_ns - before > 10 * SECOND - AQ_TURNS_IDLE_NS - 100 * MS);
	parties[0].works = true; /* and gets its turn when it comes back */
	before = parties[0].ran_ns;
	play(&now, 10 * SECOND);
	CHECK(parties[0].ran_ns - before > 3 * SECOND);
}

static void lone_container_larger_than_the_device_never_waits(void)
{
	int64_t now = SECOND;

	fresh();
	parties[2].works = true;
	parties[2].asks.demand_bytes = 100 * GIB;
	play(&now, 60 * SECOND);
	CHECK(parties[2].ran_ns == 60 * SECOND);
}

static void processes_of_one_container_share_its_time_slot(void)
{
	int64_t now = SECOND;

	fresh();
	parties[0].works = parties[1].works = parties[2].works = true;
	parties[1].asks.owner = parties[0].asks.owner; /* the demand is the container's, written by both */
	play(&now, 5 * MS);
	CHECK(play(&now, 100 * SECOND) == 2);
	CHECK(parties[0].ran_ns == parties[1].ran_ns);
	CHECK(parties[2].ran_ns > 40 * SECOND && parties[2].ran_ns < 60 * SECOND);
}

static void freed_memory_ends_the_time_slots(void)
{
	int64_t now = SECOND;

	fresh();
	parties[0].works = parties[1].works = true;
	play(&now, 10 * SECOND);
	parties[0].asks.demand_bytes = 5 * GIB;
	play(&now, 10 * MS);
	CHECK(play(&now, 5 * SECOND) == 2);
	CHECK(parties[0].waits_since == 0 && parties[1].waits_since == 0);
}

/* For any bytes that a tenant leaves on the page, the others are blocked no longer than time slots last. */
static void overwritten_line_blocks_no_container(void)
{
	static const unsigned char patterns[] = { 0x00, 0x01, 0x7f, 0x80, 0xa5, 0xff };
	int64_t now = 1000 * SECOND;

	for (unsigned i = 0; i < sizeof patterns; i++) {
		fresh();
		memset(&line, patterns[i], sizeof line);
		parties[0].works = parties[1].works = true;
		play(&now, 130 * SECOND);
		CHECK(parties[0].ran_ns > 20 * SECOND && parties[1].ran_ns > 20 * SECOND);
	}
	uint32_t random = 5;
	for (unsigned i = 0; i < 200; i++) {
		fresh();
		for (unsigned j = 0; j < sizeof line / 4; j++)
			((uint32_t *)(void *)&line)[j] = support_random(&random) % 3 ? 0 : support_random(&random);
		for (unsigned j = 0; j < AQ_TURNS_SLOTS; j += 2) /* as if at work at this moment */
			line.slot[j].seen_ns = now - (int64_t)(support_random(&random) % 1000000000);
		parties[0].works = true;
		play(&now, AQ_TURNS_MOST_NS + SECOND);
		CHECK(parties[0].ran_ns > 0);
	}
}

static void more_containers_than_places_run_without_time_slots(void)
{
	int64_t now = SECOND;

	fresh();
	for (uint64_t i = 0; i < AQ_TURNS_SLOTS; i++) {
		line.slot[i].owner = 1000 + i;
		line.slot[i].demand_bytes = GIB;
	}
	for (unsigned i = 0; i < 1000; i++, now += MS) {
		for (uint64_t j = 0; j < AQ_TURNS_SLOTS; j++)
			line.slot[j].seen_ns = now;
		CHECK(aq_turns_query(&line, &parties[0].asks, now).may_run);
	}
}

int main(void)
{
	what_fits_together_runs_together();
	what_does_not_fit_runs_one_at_a_time_and_all_alike();
	time_slot_is_long_against_the_change_of_memory();
	time_slots_have_distinct_numbers_and_a_lone_container_has_none();
	inactive_or_killed_container_is_skipped();
	lone_container_larger_than_the_device_never_waits();
	processes_of_one_container_share_its_time_slot();
	freed_memory_ends_the_time_slots();
	overwritten_line_blocks_no_container();
	more_containers_than_places_run_without_time_slots();
	return 0;
}
