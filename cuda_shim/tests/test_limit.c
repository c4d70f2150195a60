/* SPDX-License-Identifier: Apache-2.0 */
/* The compute limiter without a driver: time is an argument, so a whole day of launches is a loop. */
#include <string.h>

#include "limit/bucket.h"
#include "limit/control.h"
#include "limit/cost.h"
#include "limit/in_flight.h"
#include "limit/priority.h"
#include "limit/settle.h"
#include "tests/support.h"

#define MS 1000000ll
#define SECOND 1000000000ll

/* A tenant that launches kernels of `kernel_ns` back to back on its own device: the share of the time it got. */
static double share_obtained(uint32_t percent, int64_t kernel_ns, int64_t paid_per_kernel_ns, struct aq_bucket *bucket)
{
	int64_t length = kernel_ns * 50000 < 20 * SECOND ? kernel_ns * 50000 : 20 * SECOND;
	int64_t now = SECOND, end = now + length, busy = 0;
	while (now < end) {
		if (aq_bucket_pay(bucket, now, percent, paid_per_kernel_ns)) {
			busy += kernel_ns;
			now += kernel_ns;
		} else {
			now += aq_bucket_wait_ns(bucket, percent);
		}
	}
	return (double)busy / (double)length;
}

static void bucket_gives_exactly_the_share(void)
{
	const uint32_t percents[] = { 1, 10, 30, 50, 75, 99 };
	const int64_t kernels[] = { 20000, MS, 30 * MS };
	for (size_t p = 0; p < sizeof percents / sizeof *percents; p++)
		for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) {
			struct aq_bucket bucket = { 0 };
			double share = share_obtained(percents[p], kernels[k], kernels[k], &bucket);
			double want = percents[p] / 100.0;
			CHECK(share > want - 0.005 && share < want + 0.005);
		}
}

static void idle_container_saves_no_more_than_the_cap(void)
{
	struct aq_bucket bucket = { 0 };
	aq_bucket_refill(&bucket, SECOND, 50);
	aq_bucket_refill(&bucket, 3600 * SECOND, 50);
	CHECK(bucket.balance_ns == AQ_BUCKET_CAP_NS);
}

static void clock_that_steps_back_adds_nothing(void)
{
	struct aq_bucket bucket = { 0 };
	aq_bucket_refill(&bucket, 10 * SECOND, 50);
	int64_t before = bucket.balance_ns;
	aq_bucket_refill(&bucket, SECOND, 50);
	CHECK(bucket.balance_ns == before);
}

static const int64_t hostile_values[] = { INT64_MIN, INT64_MIN + 1, -(1ll << 62), -(1ll << 53), AQ_BUCKET_FLOOR_NS - 1, -1, 0, 1,
					  65536,     1ll << 53,     1ll << 62,    INT64_MAX };
#define HOSTILE_VALUES (sizeof hostile_values / sizeof *hostile_values)

/* A container with one process, as its region has them. */
struct payer {
	struct aq_bucket bucket;
	struct aq_settlement settlement;
	struct aq_compared compared;
};

/* The driver's figure of such a process. */
static void take_figure(struct payer *payer, int64_t paid_ns, int64_t now, int64_t span, uint32_t share_q16, uint32_t percent)
{
	struct aq_process_use use = { &payer->compared, paid_ns, share_q16, false };
	struct aq_measured measured = {
		.until_us = (uint64_t)now / 1000, .at_ns = now, .span_ns = span, .is_complete = true, .process = &use, .count = 1
	};

	aq_control_settle(&payer->bucket, &payer->settlement, percent, &measured);
}

/* A tenant that writes any value to any word, once, has its ceiling again a moment later: no less and no more. */
static void overwritten_word_neither_stops_nor_frees_launches(void)
{
	for (unsigned word = 0; word < sizeof(struct payer) / 8; word++)
		for (unsigned i = 0; i < HOSTILE_VALUES; i++) {
			struct payer payer = { 0 };
			int64_t now = SECOND, busy = 0, measured_at = now;

			share_obtained(50, MS, MS, &payer.bucket);
			memcpy((char *)&payer + word * 8ul, &hostile_values[i], sizeof hostile_values[i]);
			for (int64_t end = now + 2 * SECOND; now < end;) {
				if (aq_control_take_lease(&payer.bucket, now, true)) {
					take_figure(&payer, busy, now, now - measured_at, 32768, 50);
					measured_at = now;
				}
				bool has_paid = aq_bucket_pay(&payer.bucket, now, 50, MS);
				busy += has_paid ? MS : 0;
				now += has_paid ? MS : MS / 10;
			}
			CHECK(busy > 8 * SECOND / 10 && busy < 12 * SECOND / 10);
			CHECK(aq_settle_unknown_price(&payer.settlement) > 0);
		}
}

static void debt_beyond_the_floor_is_not_believed(void)
{
	struct aq_bucket bucket = { 0 };

	aq_bucket_settle(&bucket, 10 * -AQ_BUCKET_FLOOR_NS);
	CHECK(bucket.balance_ns == AQ_BUCKET_FLOOR_NS);
	CHECK(aq_bucket_wait_ns(&bucket, 50) > 0);
	atomic_store(&bucket.balance_ns, AQ_BUCKET_FLOOR_NS - 1);
	CHECK(aq_bucket_wait_ns(&bucket, 1) == 0);
	aq_bucket_settle(&bucket, MS);
	CHECK(bucket.balance_ns == -MS);
	aq_bucket_settle(&bucket, -SECOND);
	CHECK(bucket.balance_ns == AQ_BUCKET_CAP_NS);
}

/* A long launch is worked off also in a time in which the container does nothing. */
static void debt_is_worked_off_while_the_container_rests(void)
{
	struct aq_bucket bucket = { 0 };

	CHECK(aq_bucket_pay(&bucket, SECOND, 10, 5 * SECOND));
	CHECK(!aq_bucket_pay(&bucket, 50 * SECOND, 10, MS));
	CHECK(aq_bucket_pay(&bucket, 51 * SECOND + MS, 10, MS));
}

static void cost_is_the_recent_minimum_and_forgets(void)
{
	static struct aq_cost_table table;
	struct aq_cost_entry *entry = aq_cost_find(&table, &table, 1024, 256);
	CHECK(entry && aq_cost_estimate(entry, 77) == 77);
	aq_cost_learn(entry, 2000);
	aq_cost_learn(entry, 1000);
	aq_cost_learn(entry, 3000);
	CHECK(aq_cost_estimate(entry, 0) == 1000);
	for (int i = 0; i < 3 * (int)AQ_COST_WINDOW; i++)
		aq_cost_learn(entry, 5000);
	CHECK(aq_cost_estimate(entry, 0) == 5000);
	CHECK(atomic_load(&entry->stable));
	CHECK(aq_cost_find(&table, &table, 1024, 256) == entry);
	CHECK(aq_cost_find(&table, &table, 1025, 256) != entry);
}

/* One launch of 2 ms for every nine of 10 us, all of one shape; a neighbour that sometimes doubles the length of a launch changes
 * nothing. */
static void cost_is_at_least_half_of_the_mean(void)
{
	static struct aq_cost_table table;
	struct aq_cost_entry *entry = aq_cost_find(&table, NULL, 1, 1), *disturbed = aq_cost_find(&table, &table, 1, 1);

	aq_cost_learn(entry, 100 * MS); /* the first also loads the code */
	for (unsigned i = 1; i < AQ_COST_WINDOW; i++)
		aq_cost_learn(entry, 10000);
	CHECK(aq_cost_estimate(entry, 0) == 10000);
	for (unsigned i = 0; i < 10 * AQ_COST_WINDOW; i++) {
		aq_cost_learn(entry, i % 10 == 9 ? 2 * MS : 10000);
		aq_cost_learn(disturbed, i % 4 ? 10000 : 20000);
		CHECK(aq_cost_estimate(disturbed, 0) == 10000 || !i);
	}
	CHECK(aq_cost_is_uneven(entry) && !aq_cost_is_uneven(disturbed));
	CHECK(aq_cost_estimate(entry, 0) > 209000 / 2 / 2 && aq_cost_estimate(entry, 0) < 209000 / 2 * 2);
	for (unsigned i = 0; i < 3; i++) /* and dearer altogether: known after a few, not after a window */
		aq_cost_learn(entry, 100 * MS);
	CHECK(aq_cost_estimate(entry, 0) > MS);
}

/* All samples count for the function too, so that grids without end are known, and grids for which there is no room. */
static void grid_without_samples_costs_as_its_function(void)
{
	static struct aq_cost_table table;
	const uint64_t shapes = 2 * AQ_COST_ENTRIES;
	unsigned without_room = 0;

	aq_cost_learn(aq_cost_find(&table, &table, 1, 1), 100 * MS); /* and loaded the code */
	CHECK(aq_cost_estimate(aq_cost_find(&table, &table, 2, 1), 77) == 77);
	for (unsigned i = 0; i < AQ_COST_WINDOW; i++)
		aq_cost_learn(aq_cost_find(&table, &table, 3, 1), 5000);
	CHECK(aq_cost_estimate(aq_cost_find(&table, &table, 2, 1), 77) == 5000);
	for (uint64_t blocks = 4; blocks < shapes; blocks++) {
		struct aq_cost_entry *entry = aq_cost_find(&table, &table, blocks, 1);
		without_room += entry == aq_cost_find(&table, &table, 0, 0);
		CHECK(aq_cost_estimate(entry, 77) == 5000);
	}
	CHECK(without_room > 0);
}

static void graph_with_a_used_handle_is_not_known(void)
{
	static struct aq_cost_table table;
	struct aq_cost_entry *entry = aq_cost_find(&table, &table, 0, 0);

	for (unsigned i = 0; i < 3 * AQ_COST_WINDOW; i++) {
		aq_cost_wants_sample(entry);
		aq_cost_learn(entry, 5000);
	}
	aq_cost_forget(&table, &table);
	aq_cost_forget(&table, &entry);
	CHECK(aq_cost_find(&table, &table, 0, 0) == entry && aq_cost_estimate(entry, 77) == 77 && aq_cost_wants_sample(entry));
}

static void full_table_returns_the_fallback(void)
{
	static struct aq_cost_table table;
	const char *functions = (const char *)&table;
	bool full = false;
	for (uint64_t i = 1; i < 4 * AQ_COST_ENTRIES && !full; i++)
		full = aq_cost_find(&table, functions + i, 0, 0) == NULL;
	CHECK(full);
	CHECK(aq_cost_estimate(NULL, 77) == 77);
}

/* A program that launches one shape for two things in turn has both timed. */
static void samples_fall_on_every_part_of_a_round(void)
{
	static struct aq_cost_table table;
	struct aq_cost_entry *entry = aq_cost_find(&table, &table, 1, 1);

	for (unsigned i = 0; i < AQ_COST_EAGER; i++)
		aq_cost_wants_sample(entry);
	for (uint32_t stable = 0; stable < 2; stable++) {
		unsigned sampled[2] = { 0 };

		atomic_store(&entry->stable, stable);
		for (unsigned i = 0; i < 10 * AQ_COST_EVERY_STABLE; i++)
			sampled[i % 2] += aq_cost_wants_sample(entry);
		CHECK(sampled[0] > 3 && sampled[1] > 3);
	}
}

static void new_kernels_are_sampled_often_and_known_ones_rarely(void)
{
	static struct aq_cost_table table;
	struct aq_cost_entry *entry = aq_cost_find(&table, &table, 1, 1);
	int eager = 0, later = 0;
	for (unsigned i = 0; i < AQ_COST_WINDOW; i++)
		eager += aq_cost_wants_sample(entry);
	for (unsigned i = 0; i < 100 * AQ_COST_EVERY; i++)
		later += aq_cost_wants_sample(entry);
	CHECK(eager == AQ_COST_WINDOW && later == 100);
}

/* A tenant on its own device, with launches that pay another amount than they take. */
struct tenant {
	struct payer payer;
	uint32_t percent;
	int64_t took_ns, paid_ns; /* of each launch */
	int64_t now, busy, busy_before, paid, measured_at;
};

static void measure(struct tenant *tenant, bool is_held)
{
	int64_t span = tenant->now - tenant->measured_at;

	if (span <= 0 || !aq_control_take_lease(&tenant->payer.bucket, tenant->now, is_held))
		return;
	/* in whole percents, as drivers do */
	uint32_t percent = (uint32_t)((100 * (tenant->busy - tenant->busy_before) + span / 2) / span);

	take_figure(&tenant->payer, tenant->paid, tenant->now, span, percent * 65536 / 100, tenant->percent);
	tenant->busy_before = tenant->busy;
	tenant->measured_at = tenant->now;
}

static double share_within(struct tenant *tenant, int64_t length)
{
	int64_t begin = tenant->now, before = tenant->busy;

	while (tenant->now < begin + length) {
		bool has_paid = aq_bucket_pay(&tenant->payer.bucket, tenant->now, tenant->percent, tenant->paid_ns);

		measure(tenant, !has_paid);
		if (!has_paid)
			aq_control_give_back(&tenant->payer.bucket, &tenant->payer.settlement);
		tenant->busy += has_paid ? tenant->took_ns : 0;
		tenant->paid += has_paid ? tenant->paid_ns : 0;
		int64_t wait = aq_bucket_wait_ns(&tenant->payer.bucket, tenant->percent);
		tenant->now += has_paid ? tenant->took_ns : wait > 2 * MS ? 2 * MS : wait + 1;
	}
	return (double)(tenant->busy - before) / (double)(tenant->now - begin);
}

static void driver_figures_hold_the_ceiling_for_any_price(void)
{
	const uint32_t percents[] = { 5, 10, 50, 90 };
	const int64_t prices[] = { 0, MS / 1000, MS / 8, MS, 3 * MS };

	for (unsigned p = 0; p < sizeof percents / sizeof *percents; p++)
		for (unsigned c = 0; c < sizeof prices / sizeof *prices; c++) {
			struct tenant tenant = { .percent = percents[p], .took_ns = MS, .paid_ns = prices[c], .now = SECOND };
			share_within(&tenant, 2 * SECOND);
			double share = share_within(&tenant, 10 * SECOND), want = percents[p] / 100.0;
			CHECK(share > want - 0.03 && share < want + 0.03);
		}
}

/* At the end of the span. */
#define FIGURE(payer, paid, span, share, percent) \
	take_figure(payer, paid, (payer)->compared.closed_at_ns + (span), span, (uint32_t)((share) * 65536), percent)

static void what_was_paid_ahead_is_given_back_to_waiting_launches_once(void)
{
	struct payer payer = { 0 };

	for (unsigned i = 0; i < 4; i++)
		FIGURE(&payer, 0, 4 * AQ_CONTROL_PERIOD_NS, 0, 50);
	aq_bucket_settle(&payer.bucket, 20 * MS);
	FIGURE(&payer, 20 * MS, 4 * AQ_CONTROL_PERIOD_NS, 0, 50);
	for (unsigned i = 0; i < 100; i++)
		aq_control_give_back(&payer.bucket, &payer.settlement);
	CHECK(payer.bucket.balance_ns == -20 * MS); /* it may be for work that is still to be done */
	for (unsigned i = 0; i < 10; i++)
		FIGURE(&payer, 20 * MS, 4 * AQ_CONTROL_PERIOD_NS, 0, 50);
	CHECK(payer.bucket.balance_ns == -20 * MS);
	for (unsigned i = 0; i < 1000; i++)
		aq_control_give_back(&payer.bucket, &payer.settlement);
	CHECK(payer.bucket.balance_ns > -MS && payer.bucket.balance_ns <= 0);
	int64_t paid = (int64_t)atomic_load(&payer.bucket.paid_ns);
	FIGURE(&payer, 20 * MS, 4 * AQ_CONTROL_PERIOD_NS, 0, 50); /* what was given back is not owed */
	CHECK((int64_t)atomic_load(&payer.bucket.paid_ns) == paid);
}

static void figures_cover_earlier_payments_first(void)
{
	struct aq_compared one = { 0 };
	int64_t now = SECOND;

	CHECK(aq_control_compare(&one, now, 100 * MS, 25 * MS) == 0);
	CHECK(aq_control_compare(&one, now += AQ_CONTROL_LATE_NS, 100 * MS, 25 * MS) == -50 * MS);
	CHECK(aq_control_compare(&one, now += AQ_CONTROL_LATE_NS, 150 * MS, 70 * MS) == 20 * MS);
	CHECK(aq_control_compare(&one, now += AQ_CONTROL_LATE_NS, 140 * MS, 0) == 10 * MS); /* it got back what it had not used */
	CHECK(aq_control_compare(&one, now += AQ_CONTROL_LATE_NS, 140 * MS, 0) == 0);
	CHECK(aq_control_compare(&one, now, INT64_MIN, 0) == 0);
}

static void payment_is_ahead_only_when_the_driver_had_time_to_report(void)
{
	struct aq_compared one = { 0 };

	CHECK(aq_control_compare(&one, SECOND, 100 * MS, 0) == 0);
	CHECK(aq_control_compare(&one, SECOND + MS, 150 * MS, 0) == 0 && aq_control_uncovered(&one, 150 * MS) == 150 * MS);
	CHECK(aq_control_compare(&one, SECOND + 2 * MS, 150 * MS, 120 * MS) == 0 && aq_control_uncovered(&one, 150 * MS) == 30 * MS);
	CHECK(aq_control_compare(&one, SECOND + 3 * MS, 150 * MS, 50 * MS) == 20 * MS); /* a debt is one at once */
	CHECK(aq_control_compare(&one, SECOND + AQ_CONTROL_LATE_NS, 250 * MS, 0) == 0);
	CHECK(aq_control_compare(&one, SECOND + 2 * AQ_CONTROL_LATE_NS, 250 * MS, 0) == -100 * MS);
}

static void process_that_has_been_reported_gets_back_the_rest(void)
{
	struct payer payer = { 0 };

	FIGURE(&payer, 100 * MS, AQ_CONTROL_PERIOD_NS, 0, 50);
	aq_bucket_settle(&payer.bucket, 100 * MS);
	aq_control_conclude(&payer.settlement, &payer.compared, 100 * MS);
	aq_control_give_all_back(&payer.bucket, &payer.settlement);
	CHECK(payer.bucket.balance_ns == -100 * MS); /* the figure did not count */
	aq_control_conclude(&payer.settlement, &payer.compared, 140 * MS);
	aq_control_give_all_back(&payer.bucket, &payer.settlement);
	CHECK(payer.bucket.balance_ns == -60 * MS && aq_control_uncovered(&payer.compared, 140 * MS) == 0);
}

/* What a process paid that ends before any figure covers it counts as used: a sibling's figures neither give it back nor hide what the
 * sibling owes. */
static void ended_process_changes_nothing_for_its_siblings(void)
{
	struct payer payer = { 0 };

	for (unsigned i = 0; i < 4; i++)
		FIGURE(&payer, 0, AQ_CONTROL_PERIOD_NS, 0, 50);
	for (unsigned i = 0; i < 10; i++) {
		struct aq_compared ended = { 0 };
		struct aq_process_use uses[] = { { &payer.compared, 0, 65536 / 100, false }, { &ended, 50 * MS, 0, false } };
		struct aq_measured measured = {
			.until_us = i, .at_ns = i * AQ_CONTROL_PERIOD_NS, .span_ns = AQ_CONTROL_PERIOD_NS, .process = uses, .count = 2
		};

		aq_bucket_settle(&payer.bucket, 50 * MS);
		aq_control_settle(&payer.bucket, &payer.settlement, 50, &measured);
		aq_control_give_back(&payer.bucket, &payer.settlement);
	}
	CHECK(payer.bucket.balance_ns < -10 * 50 * MS - 9 * MS);
}

/* A figure of a process that has ended and paid `paid_ns` before; what is given back of it after all figures are in. */
static int64_t given_back(int64_t paid_ns, uint32_t share_q16, bool is_named, int64_t span)
{
	struct payer payer = { 0 };
	struct aq_process_use use = { &payer.compared, 0, share_q16, true };
	struct aq_measured measured = { .at_ns = 10 * SECOND, .span_ns = span, .is_complete = true, .process = &use, .count = 1 };

	for (unsigned i = 0; i < AQ_CONTROL_STALE; i++)
		FIGURE(&payer, 0, AQ_CONTROL_PERIOD_NS, 0, 50);
	CHECK(aq_control_end(&payer.compared, paid_ns) && aq_control_uncovered(&payer.compared, 0) == paid_ns);
	payer.settlement.ended_named_ns = is_named ? 9 * SECOND : 0;
	aq_control_settle(&payer.bucket, &payer.settlement, 50, &measured);
	CHECK(!aq_control_conclude_ended(&payer.settlement, &payer.compared, 11 * SECOND, AQ_CONTROL_ENDED_NS - 1, false));
	aq_control_conclude_ended(&payer.settlement, &payer.compared, 11 * SECOND, AQ_CONTROL_ENDED_NS, false);
	CHECK(!aq_control_conclude_ended(&payer.settlement, &payer.compared, 11 * SECOND, AQ_CONTROL_ENDED_NS, false));
	/* what is owed was taken at once */
	return payer.bucket.balance_ns - (payer.settlement.owed_ns < 0 ? payer.settlement.owed_ns : 0);
}

/* Only a driver that names processes after their end shows what they did not use. */
static void ended_process_gets_back_only_what_figures_show_as_unused(void)
{
	const int64_t span = AQ_CONTROL_PERIOD_NS;

	CHECK(given_back(50 * MS, 65536 / 5, false, span) > 29 * MS);
	CHECK(given_back(50 * MS, 65536 / 5, false, span) < 31 * MS);
	CHECK(given_back(50 * MS, 0, true, span) == 50 * MS);
	CHECK(given_back(50 * MS, 0, false, span) == 0);
	CHECK(given_back(50 * MS, 0, true, AQ_CONTROL_GAP_NS + 1) == 0); /* figures of a long time do not say when it used the device */
	CHECK(given_back(50 * MS, 65536 * 9 / 10, false, span) < -39 * MS && given_back(50 * MS, 65536 * 9 / 10, false, span) > -41 * MS);
}

/* However many: each hides what the driver's whole percents round away, and gets no more of that back than one process would. */
static void many_ended_processes_hide_no_more_than_one(void)
{
	struct payer payer = { 0 };
	struct aq_compared ended[64] = { 0 };
	struct aq_process_use uses[64];
	struct aq_measured measured = { .at_ns = SECOND, .span_ns = AQ_CONTROL_PERIOD_NS, .process = uses, .count = 64 };
	bool may_be_unseen = false;

	for (unsigned i = 0; i < AQ_CONTROL_STALE; i++)
		FIGURE(&payer, 0, AQ_CONTROL_PERIOD_NS, 0, 50);
	for (unsigned i = 0; i < 64; i++) {
		CHECK(aq_control_end(&ended[i], MS + (i % 2 ? 0 : MS)));
		uses[i] = (struct aq_process_use){ &ended[i], 0, i % 2 ? 0 : 656, true };
	}
	aq_control_settle(&payer.bucket, &payer.settlement, 50, &measured);
	for (unsigned i = 0; i < 64; i++)
		may_be_unseen |= aq_control_conclude_ended(&payer.settlement, &ended[i], 2 * SECOND, SECOND, may_be_unseen);
	CHECK(payer.settlement.owed_ns <= 0 && payer.settlement.owed_ns >= -2 * MS);
}

/* What a tenant used while no ceiling applied does not count against it afterwards; the first figures still reflect that. */
static void usage_without_a_ceiling_is_not_settled(void)
{
	struct payer payer = { 0 };

	for (unsigned round = 0; round < 3; round++) {
		for (unsigned i = 0; i < AQ_CONTROL_STALE; i++)
			FIGURE(&payer, 0, AQ_CONTROL_PERIOD_NS, 1, 5);
		CHECK(payer.bucket.balance_ns == 0);
		aq_control_interrupted(&payer.bucket);
	}
	for (unsigned i = 0; i <= AQ_CONTROL_STALE; i++)
		FIGURE(&payer, 0, AQ_CONTROL_PERIOD_NS, 1, 5);
	CHECK(payer.bucket.balance_ns == -AQ_CONTROL_PERIOD_NS); /* but too much is too much */
}

/* A tenant that launches once in two seconds is measured over all of them: that says when it worked only roughly. */
static void figure_over_a_long_time_only_takes(void)
{
	struct payer payer = { 0 };

	FIGURE(&payer, 0, 2 * SECOND, 0.5, 50);
	for (unsigned i = 0; i < 3; i++)
		FIGURE(&payer, 5 * SECOND, 2 * SECOND, 0, 50);
	CHECK(payer.bucket.balance_ns == 0 && payer.settlement.owed_ns == 0);
	FIGURE(&payer, 5 * SECOND, 2 * SECOND, 0.5, 50);
	CHECK(payer.bucket.balance_ns == -AQ_CONTROL_PERIOD_NS);
}

static void lease_is_for_one_and_seldom_without_waiting(void)
{
	struct aq_bucket bucket = { 0 };

	CHECK(aq_control_take_lease(&bucket, SECOND, false) && !aq_control_take_lease(&bucket, SECOND, true));
	CHECK(!aq_control_take_lease(&bucket, SECOND + AQ_CONTROL_PERIOD_NS, false));
	CHECK(aq_control_take_lease(&bucket, SECOND + AQ_CONTROL_PERIOD_NS, true));
	CHECK(aq_control_take_lease(&bucket, SECOND + AQ_CONTROL_PERIOD_NS + AQ_CONTROL_UNHELD_NS, false));
	atomic_store(&bucket.lease_until_ns, INT64_MAX);
	CHECK(aq_control_take_lease(&bucket, SECOND, true));
}

/* ---- settling launches ---- */

static void unknown_launch_settles_all_and_known_one_only_much(void)
{
	CHECK(aq_settle_owed(AQ_PRICE_UNKNOWN, MS, 50 * MS) == 49 * MS);
	CHECK(aq_settle_owed(AQ_PRICE_PREDICTED, MS, MS / 2) == -MS / 2);
	CHECK(aq_settle_owed(AQ_PRICE_UNEVEN, MS, 2 * MS) == MS && aq_settle_owed(AQ_PRICE_UNEVEN, MS, 0) == -MS);
	CHECK(aq_settle_owed(AQ_PRICE_KNOWN, MS, 2 * MS) == 0 && aq_settle_owed(AQ_PRICE_KNOWN, MS, 0) == 0);
	CHECK(aq_settle_owed(AQ_PRICE_KNOWN, MS, 50 * MS) == 49 * MS);
}

static void unknown_launch_pays_what_such_launches_took(void)
{
	struct aq_settlement settlement = { 0 };

	CHECK(aq_settle_unknown_price(&settlement) == AQ_SETTLE_UNKNOWN_NS);
	aq_settle_unknown_took(&settlement, 50 * MS);
	CHECK(aq_settle_unknown_price(&settlement) == 50 * MS);
	aq_settle_unknown_took(&settlement, 10 * MS);
	CHECK(aq_settle_unknown_price(&settlement) == 40 * MS);
	for (unsigned i = 0; i < 100; i++)
		aq_settle_unknown_took(&settlement, 0);
	CHECK(aq_settle_unknown_price(&settlement) > 0 && aq_settle_unknown_price(&settlement) < 10);
	aq_settle_unknown_took(&settlement, 3600 * SECOND);
	CHECK(aq_settle_unknown_price(&settlement) == AQ_SETTLE_UNKNOWN_MOST_NS);
}

static void timed_launches_count_for_the_time_in_flight_at_most(void)
{
	struct aq_flight_time time = { 0 };

	aq_flight_time_look(&time, SECOND);
	CHECK(aq_flight_time_take(&time, MS) == 0); /* nothing was in flight */
	aq_flight_time_begin(&time, SECOND);
	aq_flight_time_begin(&time, SECOND + 5 * MS);
	aq_flight_time_look(&time, SECOND + 20 * MS);
	CHECK(aq_flight_time_take(&time, 10 * MS) == 10 * MS); /* two, in two streams: the second waited for the first */
	CHECK(aq_flight_time_take(&time, 20 * MS) == 10 * MS);
	aq_flight_time_look(&time, SECOND + 30 * MS);
	aq_flight_time_end(&time);
	CHECK(aq_flight_time_take(&time, 20 * MS) == 0);
}

static void launch_of_a_dead_process_is_paid_within_bounds(void)
{
	CHECK(aq_settle_orphan(0, SECOND) == 0 && aq_settle_orphan(2 * SECOND, SECOND) == 0 && aq_settle_orphan(INT64_MIN, SECOND) == 0);
	CHECK(aq_settle_orphan(SECOND, SECOND + 20 * MS) == 20 * MS);
	CHECK(aq_settle_orphan(SECOND, 3600 * SECOND) == AQ_SETTLE_ORPHAN_NS);
}

static void low_priority_trickles_while_the_device_is_wanted(void)
{
	struct aq_priority_own own = { 0 };
	int64_t said = 0;

	CHECK(aq_priority_percent(said, SECOND, 40) == 40);
	for (unsigned i = 0; i < 2; i++) {
		CHECK(aq_priority_want(&own, SECOND, 20 * MS));
		said = aq_priority_update(&own, said, SECOND);
	}
	CHECK(aq_priority_percent(said, SECOND + 49 * MS, 40) == AQ_PRIORITY_TRICKLE_PERCENT);
	CHECK(aq_priority_percent(said, SECOND + 49 * MS, 0) == AQ_PRIORITY_TRICKLE_PERCENT);
	CHECK(aq_priority_percent(said, SECOND + 49 * MS, 2) == 2);
	CHECK(aq_priority_percent(said, SECOND + 51 * MS, 40) == 40);
	CHECK(aq_priority_want(&own, 2 * SECOND, 3600 * SECOND));
	CHECK(aq_priority_percent(aq_priority_update(&own, said, 2 * SECOND), 3 * SECOND + 11 * MS, 40) == 40);
	CHECK(aq_priority_percent(INT64_MIN, SECOND, 40) == 40);
	CHECK(aq_priority_percent(INT64_MAX, SECOND, 40) == 40);
}

static void short_launches_are_written_together_and_never_late(void)
{
	struct aq_priority_own own = { 0 };
	int64_t said = 0, done = 0, now = SECOND;
	unsigned told = 0;

	for (unsigned i = 0; i < 100000; i++, now += 5000) { /* half a second of launches that take 4 us every 5 us */
		done = (done > now ? done : now) + 4000;
		if (aq_priority_want(&own, now, 4000)) {
			said = aq_priority_update(&own, said, now);
			told++;
		}
		CHECK(said <= done && done - said <= AQ_PRIORITY_LATE_NS);
	}
	CHECK(told > 1000 && told < 2100);
	now += 100 * MS;
	CHECK(aq_priority_want(&own, now, 4000)); /* at once after a rest */
}

static void work_of_several_adds_up_and_lost_writes_are_repeated(void)
{
	struct aq_priority_own one = { 0 }, other = { 0 };
	int64_t said = 0;

	CHECK(aq_priority_want(&one, SECOND, 300 * MS) && aq_priority_want(&other, SECOND, 10 * MS));
	said = aq_priority_update(&one, said, SECOND);
	said = aq_priority_update(&other, said, SECOND);
	CHECK(said == SECOND + 310 * MS);
	CHECK(aq_priority_want(&one, SECOND + MS, MS)); /* the page was truncated and recreated meanwhile */
	CHECK(aq_priority_update(&one, 0, SECOND + MS) == SECOND + 301 * MS);
}

static void new_ceiling_starts_without_saved_credit(void)
{
	struct aq_bucket bucket = { 0 };

	CHECK(aq_bucket_pay(&bucket, SECOND, 5, MS) && !aq_bucket_pay(&bucket, SECOND, 5, MS));
	aq_bucket_interrupted(&bucket);
	CHECK(!aq_bucket_pay(&bucket, 60 * SECOND, 5, MS)); /* a minute without one later */
	CHECK(aq_bucket_pay(&bucket, 60 * SECOND + 20 * MS, 5, MS));
	aq_bucket_refill(&bucket, 70 * SECOND, 5);
	aq_bucket_spill(&bucket, MS / 4);
	CHECK(bucket.balance_ns == MS / 4);
	aq_bucket_spill(&bucket, MS);
	CHECK(bucket.balance_ns == MS / 4);
}

/* ---- work in flight ---- */

#define SHARERS_MAX 16
#define LOOK_NS (MS / 10)

/* One device, and processes that submit kernels of one length without end, as many as allowed, and look for progress all the time. */
struct device {
	unsigned sharers;
	int64_t kernel_ns;
	int64_t paid_ns;  /* for each kernel */
	int64_t slice_ns; /* each has the whole device for that time, one after the other; 0 = all share it evenly at each moment */
	struct aq_in_flight flight[SHARERS_MAX];
	double done_ns[SHARERS_MAX]; /* by each */
	unsigned turn;
	int64_t turn_ends_ns, idle_ns;
};

/* Unfinished device time. */
static double left_to(const struct device *device, unsigned sharer)
{
	return (double)device->flight[sharer].submitted_ns / (double)device->paid_ns * (double)device->kernel_ns - device->done_ns[sharer];
}

static void work(struct device *device, int64_t now)
{
	unsigned waiting = 0;

	for (unsigned i = 0; i < device->sharers; i++)
		waiting += left_to(device, i) > 0;
	device->idle_ns += waiting ? 0 : LOOK_NS;
	for (unsigned i = 0; i < device->sharers && device->slice_ns && (now >= device->turn_ends_ns || left_to(device, device->turn) <= 0);
	     i++) {
		device->turn = (device->turn + 1) % device->sharers;
		device->turn_ends_ns = now + device->slice_ns;
	}
	for (unsigned i = 0; i < device->sharers; i++) {
		double share = device->slice_ns ? i == device->turn : 1.0 / waiting, left = left_to(device, i);
		device->done_ns[i] += left > 0 && share * LOOK_NS > left ? left : left > 0 ? share * LOOK_NS : 0;
	}
}

static void look_and_submit(struct device *device, unsigned sharer, int64_t now)
{
	struct aq_in_flight *flight = &device->flight[sharer];
	uint32_t part = aq_in_flight_part(flight);

	flight->finished_ns = (int64_t)(device->done_ns[sharer] / (double)device->kernel_ns + 1e-6) * device->paid_ns;
	aq_in_flight_look(flight, now);
	while (aq_in_flight_has_room(flight, part, device->paid_ns))
		flight->submitted_ns += device->paid_ns;
}

/* The most unfinished device time of all together after half a second. */
static int64_t most_in_flight(struct device *device, int64_t begin_ns)
{
	double most = 0;

	for (int64_t now = begin_ns; now < begin_ns + SECOND; now += LOOK_NS) {
		double together = 0;

		if (now == begin_ns + SECOND / 2)
			device->idle_ns = 0;
		work(device, now);
		for (unsigned i = 0; i < device->sharers; i++)
			look_and_submit(device, i, now);
		for (unsigned i = 0; i < device->sharers; i++)
			together += left_to(device, i);
		if (now > begin_ns + SECOND / 2 && together > most)
			most = together;
	}
	return (int64_t)most;
}

static void many_processes_have_as_much_in_flight_as_one_and_no_idle_device(void)
{
	const unsigned sharers[] = { 1, 2, 8, 16 };
	const int64_t kernels[] = { 20000, 200000 }, slices[] = { 0, 2 * MS };

	for (size_t n = 0; n < sizeof sharers / sizeof *sharers; n++)
		for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++)
			for (size_t s = 0; s < sizeof slices / sizeof *slices; s++) {
				struct device device = {
					.sharers = sharers[n], .kernel_ns = kernels[k], .paid_ns = kernels[k], .slice_ns = slices[s]
				};

				CHECK(most_in_flight(&device, SECOND) <= (slices[s] ? 2 : 1) * AQ_IN_FLIGHT_NS + kernels[k]);
				CHECK(device.idle_ns == 0);
			}
}

static void in_flight_is_bounded_when_launches_cost_more_than_paid(void)
{
	struct device device = { .sharers = 2, .kernel_ns = 200000, .paid_ns = 20000 };

	CHECK(most_in_flight(&device, SECOND) <= AQ_IN_FLIGHT_NS + 200000);
	CHECK(device.idle_ns == 0);
}

static void last_process_gets_the_whole_device(void)
{
	struct device device = { .sharers = 16, .kernel_ns = 20000, .paid_ns = 20000 };

	most_in_flight(&device, SECOND);
	CHECK(aq_in_flight_part(&device.flight[0]) < AQ_PART_ONE / 8);
	device.sharers = 1;
	CHECK(most_in_flight(&device, 2 * SECOND) > AQ_IN_FLIGHT_NS * 9 / 10);
	CHECK(device.idle_ns == 0);
}

static void long_launch_goes_alone_and_is_waited_for(void)
{
	struct aq_in_flight flight = { 0 };
	const uint32_t part = AQ_PART_ONE / 16;

	CHECK(aq_in_flight_has_room(&flight, part, 10 * MS));
	CHECK(aq_in_flight_patience_ns(&flight, part) < 50 * MS);
	flight.submitted_ns = 10 * MS;
	CHECK(!aq_in_flight_has_room(&flight, part, MS / 100));
	CHECK(aq_in_flight_patience_ns(&flight, part) > 16 * 10 * MS);
	flight.submitted_ns = 3600 * SECOND;
	CHECK(aq_in_flight_patience_ns(&flight, part) <= SECOND);
	aq_in_flight_give_up(&flight);
	CHECK(aq_in_flight_has_room(&flight, part, 10 * MS));
}

static void idle_process_keeps_its_part(void)
{
	struct aq_in_flight flight = { 0 };

	aq_in_flight_look(&flight, SECOND);
	flight.submitted_ns = 2 * MS;
	aq_in_flight_look(&flight, 3 * SECOND); /* it did not look, so it did not launch */
	CHECK(aq_in_flight_part(&flight) == AQ_PART_ONE);
	flight.finished_ns = 2 * MS;
	aq_in_flight_look(&flight, 3 * SECOND + 8 * MS); /* all is finished, at an unknown time */
	CHECK(aq_in_flight_part(&flight) == AQ_PART_ONE);
	aq_in_flight_look(&flight, 3 * SECOND + 16 * MS); /* there was nothing to do */
	CHECK(aq_in_flight_part(&flight) == AQ_PART_ONE);
	flight.submitted_ns = 6 * MS;
	aq_in_flight_look(&flight, 3 * SECOND + 24 * MS);
	CHECK(aq_in_flight_part(&flight) < AQ_PART_ONE);
}

int main(void)
{
	bucket_gives_exactly_the_share();
	idle_container_saves_no_more_than_the_cap();
	clock_that_steps_back_adds_nothing();
	overwritten_word_neither_stops_nor_frees_launches();
	debt_beyond_the_floor_is_not_believed();
	debt_is_worked_off_while_the_container_rests();
	cost_is_the_recent_minimum_and_forgets();
	cost_is_at_least_half_of_the_mean();
	grid_without_samples_costs_as_its_function();
	full_table_returns_the_fallback();
	samples_fall_on_every_part_of_a_round();
	new_kernels_are_sampled_often_and_known_ones_rarely();
	graph_with_a_used_handle_is_not_known();
	driver_figures_hold_the_ceiling_for_any_price();
	what_was_paid_ahead_is_given_back_to_waiting_launches_once();
	figures_cover_earlier_payments_first();
	payment_is_ahead_only_when_the_driver_had_time_to_report();
	process_that_has_been_reported_gets_back_the_rest();
	ended_process_changes_nothing_for_its_siblings();
	ended_process_gets_back_only_what_figures_show_as_unused();
	many_ended_processes_hide_no_more_than_one();
	usage_without_a_ceiling_is_not_settled();
	figure_over_a_long_time_only_takes();
	lease_is_for_one_and_seldom_without_waiting();
	unknown_launch_settles_all_and_known_one_only_much();
	unknown_launch_pays_what_such_launches_took();
	timed_launches_count_for_the_time_in_flight_at_most();
	launch_of_a_dead_process_is_paid_within_bounds();
	low_priority_trickles_while_the_device_is_wanted();
	short_launches_are_written_together_and_never_late();
	work_of_several_adds_up_and_lost_writes_are_repeated();
	new_ceiling_starts_without_saved_credit();
	many_processes_have_as_much_in_flight_as_one_and_no_idle_device();
	in_flight_is_bounded_when_launches_cost_more_than_paid();
	last_process_gets_the_whole_device();
	long_launch_goes_alone_and_is_waited_for();
	idle_process_keeps_its_part();
	return 0;
}
