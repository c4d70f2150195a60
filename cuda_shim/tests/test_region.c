/* SPDX-License-Identifier: Apache-2.0 */
/* Slots, charging, killing, reaping, repairing: real processes, real kills. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "account/ledger.h"
#include "limit/control.h"
#include "region/region.h"
#include "tests/support.h"

#define LIMIT (64 * MIB)
#define PROCESSES 8
#define KILLS 60
#define DEVICE 3u

static struct aq_region region;

static void attach(void)
{
	struct aq_fault fault;

	if (aq_region_map(&region, support_region(), AQ_REGION_WRITE, &fault) || aq_region_take_slot(&region, &fault)) {
		fprintf(stderr, "%s\n", fault.text);
		exit(1);
	}
}

static void detach(void)
{
	aq_region_unmap(&region);
}

static struct aq_region_device *line(void)
{
	return aq_region_line(&region, DEVICE);
}

static struct aq_slot_device *mine(void)
{
	return aq_region_mine(&region, DEVICE);
}

static double now_seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- charging -------------------------------------------------------------------------------------------------- */

static void exactly_the_limit_fits(void)
{
	attach();
	CHECK(aq_ledger_charge(line(), mine(), LIMIT - 1, LIMIT));
	CHECK(!aq_ledger_charge(line(), mine(), 2, LIMIT));
	CHECK(aq_ledger_charge(line(), mine(), 1, LIMIT));
	CHECK(!aq_ledger_charge(line(), mine(), 1, LIMIT));
	CHECK(!aq_ledger_charge(line(), mine(), UINT64_MAX, LIMIT));
	CHECK(line()->used_bytes == LIMIT);
	aq_ledger_uncharge(line(), mine(), LIMIT);
	CHECK(line()->used_bytes == 0 && aq_slot_used_bytes(mine()) == 0);
	detach();
}

static void *charge_and_check(void *unused)
{
	uint32_t random = (uint32_t)(uintptr_t)&unused | 1;

	(void)unused;
	for (int i = 0; i < 20000; i++) {
		uint64_t bytes = support_random(&random) % (LIMIT / 2) + 1;

		if (aq_ledger_charge(line(), mine(), bytes, LIMIT)) {
			CHECK(atomic_load(&line()->used_bytes) <= LIMIT);
			aq_ledger_uncharge(line(), mine(), bytes);
		}
	}
	return NULL;
}

static void compete(void)
{
	pthread_t threads[2];

	attach();
	for (unsigned i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, charge_and_check, NULL) == 0);
	for (unsigned i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	_exit(0);
}

static void processes_and_threads_together_never_pass_the_limit(void)
{
	for (int i = 0; i < PROCESSES; i++)
		if (fork() == 0)
			compete();
	for (int i = 0; i < PROCESSES; i++) {
		int status;

		CHECK(wait(&status) > 0);
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	attach();
	CHECK(line()->used_bytes == 0);
	detach();
}

/* ---- killing --------------------------------------------------------------------------------------------------- */

static void charge_forever(void)
{
	uint32_t random = (uint32_t)getpid() | 1;
	uint64_t held = 0;

	attach();
	for (;;) {
		uint64_t bytes = support_random(&random) % MIB + 1;

		if (held < LIMIT / PROCESSES && aq_ledger_charge(line(), mine(), bytes, LIMIT))
			held += bytes;
		else if (held) {
			aq_ledger_uncharge(line(), mine(), held);
			held = 0;
		}
	}
}

static void killed_processes_leave_nothing(void)
{
	uint32_t random = 12345;
	double slowest = 0;

	for (int kills = 0; kills < KILLS;) {
		pid_t children[PROCESSES];

		for (int i = 0; i < PROCESSES; i++) {
			children[i] = fork();
			if (children[i] == 0)
				charge_forever();
		}
		usleep(2000 + support_random(&random) % 20000);
		for (int i = 0; i < PROCESSES; i++, kills++) {
			kill(children[i], SIGKILL);
			CHECK(waitpid(children[i], NULL, 0) == children[i]);
		}
		double begin = now_seconds();
		attach(); /* a newcomer reaps */
		double took = now_seconds() - begin;
		slowest = took > slowest ? took : slowest;
		CHECK(line()->used_bytes == 0);
		CHECK(aq_ledger_charge(line(), mine(), LIMIT, LIMIT));
		aq_ledger_uncharge(line(), mine(), LIMIT);
		detach();
	}
	CHECK(slowest < 1.0);
}

static void survivor_gets_memory_of_the_killed_while_others_run(void)
{
	pid_t busy = fork();

	if (busy == 0)
		charge_forever();
	pid_t holder = fork();
	if (holder == 0) {
		attach();
		CHECK(aq_ledger_charge(line(), mine(), LIMIT / 2, LIMIT));
		pause();
	}
	attach();
	for (int i = 0; i < 1000 && line()->used_bytes < LIMIT / 2; i++)
		usleep(1000);
	CHECK(line()->used_bytes >= LIMIT / 2);
	kill(holder, SIGKILL);
	CHECK(waitpid(holder, NULL, 0) == holder);
	CHECK(aq_region_reclaim(&region));
	CHECK(aq_ledger_charge(line(), mine(), LIMIT / 2, LIMIT));
	CHECK(line()->used_bytes <= LIMIT);
	kill(busy, SIGKILL);
	CHECK(waitpid(busy, NULL, 0) == busy);
	detach();
	attach();
	CHECK(line()->used_bytes == 0);
	detach();
}

/* ---- repairing ------------------------------------------------------------------------------------------------- */

static void leak_is_repaired_only_while_counters_do_not_change(void)
{
	attach();
	atomic_fetch_add(&line()->used_bytes, 5 * MIB); /* as a kill between the line's step and the slot's leaves it */
	atomic_fetch_add(&mine()->intended, MIB); /* a process is between two steps */
	aq_region_reclaim(&region);
	CHECK(line()->used_bytes == 5 * MIB);
	atomic_fetch_add(&line()->used_bytes, MIB);
	atomic_fetch_add(&mine()->charged, MIB);
	CHECK(aq_region_reclaim(&region));
	CHECK(line()->used_bytes == MIB);
	aq_ledger_uncharge(line(), mine(), MIB);
	CHECK(line()->used_bytes == 0);
	detach();
}

static void overwritten_line_is_raised_to_the_true_sum(void)
{
	attach();
	CHECK(aq_ledger_charge(line(), mine(), 8 * MIB, LIMIT));
	atomic_store(&line()->used_bytes, 0);
	aq_region_reclaim(&region);
	CHECK(line()->used_bytes == 8 * MIB);
	aq_ledger_uncharge(line(), mine(), 8 * MIB);
	detach();
}

/* ---- slots ----------------------------------------------------------------------------------------------------- */

static void a_forked_child_is_no_part_of_its_parents_slot(void)
{
	attach();
	int parents = region.slot_index;
	pid_t child = fork();

	if (child == 0) {
		aq_region_forget(&region);
		attach();
		CHECK(region.slot_index != parents);
		CHECK(aq_region_is_live(&region, (uint32_t)parents));
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(aq_region_is_live(&region, (uint32_t)parents));
	detach();
}

static void a_slot_dies_with_its_process_although_a_child_lives_on(void)
{
	int tell[2], stop[2];

	CHECK(pipe(tell) == 0 && pipe(stop) == 0);
	pid_t parent = fork();
	if (parent == 0) {
		attach();
		CHECK(aq_ledger_charge(line(), mine(), MIB, LIMIT));
		if (fork() == 0) {
			char byte;

			aq_region_forget(&region); /* as the fork handler does */
			CHECK(write(tell[1], "x", 1) == 1);
			CHECK(read(stop[0], &byte, 1) >= 0);
			_exit(0);
		}
		pause();
	}
	char byte;
	CHECK(read(tell[0], &byte, 1) == 1);
	kill(parent, SIGKILL);
	CHECK(waitpid(parent, NULL, 0) == parent);
	attach();
	CHECK(line()->used_bytes == 0);
	detach();
	CHECK(write(stop[1], "x", 1) == 1);
}

static void full_region_is_reported_and_a_leaving_process_makes_room(void)
{
	static struct aq_region crowd[AQ_SLOT_COUNT];
	struct aq_fault fault;

	for (unsigned i = 0; i < AQ_SLOT_COUNT; i++) {
		CHECK(aq_region_map(&crowd[i], support_region(), AQ_REGION_WRITE, &fault) == 0);
		CHECK(aq_region_take_slot(&crowd[i], &fault) == 0);
		CHECK(crowd[i].slot_index == (int)i);
	}
	CHECK(aq_region_map(&region, support_region(), AQ_REGION_WRITE, &fault) == 0);
	CHECK(aq_region_take_slot(&region, &fault) == -1);
	CHECK(strstr(fault.text, "all 256 slots"));
	aq_region_unmap(&crowd[17]);
	CHECK(aq_region_take_slot(&region, &fault) == 0);
	CHECK(region.slot_index == 17);
	aq_region_unmap(&region);
	for (unsigned i = 0; i < AQ_SLOT_COUNT; i++)
		aq_region_unmap(&crowd[i]);
}

/* An older version of the shim buried the slot's owner and did not know all that a slot has. */
static void slot_identity_is_reset_with_each_owner(void)
{
	attach();
	memset(&mine()->context_bytes, 0xa5, sizeof(struct aq_slot_device) - offsetof(struct aq_slot_device, context_bytes));
	atomic_store(&aq_region_slot(&region, (uint32_t)region.slot_index)->host_pid, 7);
	atomic_store(&aq_region_slot(&region, (uint32_t)region.slot_index)->state, AQ_SLOT_FREE);
	detach();
	attach();
	CHECK(region.slot_index == 0 && aq_region_slot(&region, 0)->host_pid == 0);
	CHECK(mine()->context_bytes == 0 && mine()->managed_bytes == 0 && mine()->pool_bytes == 0 && mine()->array_bytes == 0);
	CHECK(mine()->refusals == 0 && mine()->last_refused_bytes == 0 && mine()->launches == 0 && mine()->busy_ns == 0);
	CHECK(mine()->throttled_ns == 0 && mine()->contexts == 0 && mine()->waiting == 0 && mine()->module_bytes == 0);
	CHECK(mine()->unsettled_since_ns == 0);
	detach();
}

/* The container pays for the launch that a killed process did not settle, and for one only. */
static void launch_of_a_dead_process_is_paid_by_the_next_one(void)
{
	attach();
	int64_t before = line()->compute.balance_ns, since = (int64_t)(now_seconds() * 1e9) - 20000000;

	atomic_store(&mine()->unsettled_since_ns, since);
	detach();
	attach();
	int64_t owed = before - line()->compute.balance_ns;
	CHECK(owed >= 20000000 && owed < AQ_SETTLE_ORPHAN_NS);
	CHECK(mine()->unsettled_since_ns == 0);
	detach();
	attach();
	CHECK(before - line()->compute.balance_ns == owed);
	detach();
	support_write_region();
}

/* An empty region with the virtual ledgers, where payments are left. */
static void write_region_with_ledgers(void)
{
	const uint32_t place[] = { AQ_REGION_VIRTUAL_OFFSET, sizeof(struct aq_virtual_row) };

	support_write_region();
	int fd = open(support_region(), O_RDWR | O_CLOEXEC);
	CHECK(pwrite(fd, place, sizeof(place), offsetof(struct aq_region_header, virtual_offset)) == (ssize_t)sizeof(place));
	close(fd);
}

/* What it paid is left in its slot, for figures that are still to come: the next process takes another slot, but never finds none. */
static void slot_of_a_payer_is_kept_while_figures_may_name_it(void)
{
	struct aq_virtual_device *row;

	write_region_with_ledgers();
	attach();
	row = aq_region_virtual(&region, 0, DEVICE);
	CHECK(region.slot_index == 0 && row->ended_at_ns == 0 && aq_region_slot(&region, 0)->pid_namespace != 0);
	atomic_store(&mine()->busy_ns, 50000000);
	detach();
	attach();
	row = aq_region_virtual(&region, 0, DEVICE);
	CHECK(region.slot_index == 1 && aq_region_slot(&region, 0)->pid == (uint32_t)getpid());
	CHECK(row->compared.pending_ns == 50000000 && aq_region_ended_ago_ns(row, row->ended_at_ns + 5) == 5);
	CHECK(aq_region_ended_ago_ns(row, row->ended_at_ns + AQ_CONTROL_KEPT_NS) == -1);
	detach();
	for (uint32_t i = 0; i < region.slot_count; i++) {
		attach();
		CHECK(region.slot_index >= 0);
		atomic_store(&mine()->busy_ns, 50000000);
		detach();
	}
	support_write_region();
}

static void damage_is_refused_with_its_reason(void)
{
	struct aq_region broken;
	struct aq_fault fault;

	CHECK(truncate(support_region(), 100) == 0);
	CHECK(aq_region_map(&broken, support_region(), AQ_REGION_WRITE, &fault) == -1 && strstr(fault.text, "truncated"));
	aq_region_unmap(&broken);
	support_write_region();
	CHECK(truncate(support_region(), 8192) == 0);
	CHECK(aq_region_map(&broken, support_region(), AQ_REGION_WRITE, &fault) == -1 && strstr(fault.text, "truncated or damaged"));
	aq_region_unmap(&broken);
	unlink(support_region());
	CHECK(aq_region_map(&broken, support_region(), AQ_REGION_WRITE, &fault) == -1 && strstr(fault.text, "cannot open"));
	aq_region_unmap(&broken);
	support_write_region();
}

int main(void)
{
	support_directory();
	support_write_region();
	exactly_the_limit_fits();
	processes_and_threads_together_never_pass_the_limit();
	killed_processes_leave_nothing();
	survivor_gets_memory_of_the_killed_while_others_run();
	leak_is_repaired_only_while_counters_do_not_change();
	overwritten_line_is_raised_to_the_true_sum();
	a_forked_child_is_no_part_of_its_parents_slot();
	a_slot_dies_with_its_process_although_a_child_lives_on();
	full_region_is_reported_and_a_leaving_process_makes_room();
	slot_identity_is_reset_with_each_owner();
	launch_of_a_dead_process_is_paid_by_the_next_one();
	slot_of_a_payer_is_kept_while_figures_may_name_it();
	damage_is_refused_with_its_reason();
	support_remove();
	return 0;
}
