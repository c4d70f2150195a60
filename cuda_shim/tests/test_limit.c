/* The compute limiter without a driver: time is an argument, so a whole day of launches is a loop. */
#include <string.h>

#include "limit/bucket.h"
#include "limit/control.h"
#include "limit/cost.h"
#include "limit/in_flight.h"
#include "limit/priority.h"
#include "tests/support.h"

#define MS 1000000ll
#define SECOND 1000000000ll

/* A tenant that launches kernels of `kernel_ns` back to back on a device of its own: the share of the time it got. */
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
	const uint32_t percents[] = {1, 10, 30, 50, 75, 99};
	const int64_t kernels[] = {20000, MS, 30 * MS};
	for (size_t p = 0; p < sizeof percents / sizeof *percents; p++)
		for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) {
			struct aq_bucket bucket = {0};
			double share = share_obtained(percents[p], kernels[k], kernels[k], &bucket);
			double want = percents[p] / 100.0;
			CHECK(share > want - 0.005 && share < want + 0.005);
		}
}

static void idle_container_saves_no_more_than_the_cap(void)
{
	struct aq_bucket bucket = {0};
	aq_bucket_refill(&bucket, SECOND, 50);
	aq_bucket_refill(&bucket, 3600 * SECOND, 50);
	CHECK(bucket.balance_ns == AQ_BUCKET_CAP_NS);
}

static void clock_that_steps_back_adds_nothing(void)
{
	struct aq_bucket bucket = {0};
	aq_bucket_refill(&bucket, 10 * SECOND, 50);
	int64_t before = bucket.balance_ns;
	aq_bucket_refill(&bucket, SECOND, 50);
	CHECK(bucket.balance_ns == before);
}

static void scribbled_bucket_neither_hangs_nor_overflows(void)
{
	struct aq_bucket bucket;
	memset(&bucket, 0x7f, sizeof bucket);
	aq_control_correct(&bucket, SECOND, 1, 50, AQ_GAIN_ONE / 2);
	CHECK(atomic_load(&bucket.regime) >> 8 <= AQ_CONTROL_STALE);
	atomic_store(&bucket.gain_q16, AQ_GAIN_ONE);
	aq_bucket_refill(&bucket, SECOND, 100);
	CHECK(aq_bucket_wait_ns(&bucket, 50) >= 0);
	atomic_store(&bucket.balance_ns, INT64_MIN + 1);
	CHECK(aq_bucket_wait_ns(&bucket, 1) > 0);
	atomic_store(&bucket.refilled_at_ns, INT64_MAX);
	atomic_store(&bucket.balance_ns, -MS);
	aq_bucket_refill(&bucket, SECOND, 50);
	aq_bucket_refill(&bucket, 2 * SECOND, 50);
	CHECK(bucket.balance_ns > 0);
	atomic_store(&bucket.lease_until_ns, INT64_MAX);
	CHECK(aq_control_take_lease(&bucket, SECOND, true));
}

static void cost_is_the_recent_minimum_and_forgets(void)
{
	static struct aq_cost_table table;
	struct aq_cost_entry *entry = aq_cost_find(&table, &table, 1024, 256);
	CHECK(entry && aq_cost_estimate(entry, AQ_COST_UNKNOWN_NS) == AQ_COST_UNKNOWN_NS);
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

/* A launch of 2 ms for every nine of 10 us, all of one shape; a neighbour that makes a launch twice as long now and then changes nothing. */
static void a_cost_is_no_less_than_an_eighth_of_the_mean(void)
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
	CHECK(aq_cost_estimate(entry, 0) > 209000 / 8 / 2 && aq_cost_estimate(entry, 0) < 209000 / 8 * 2);
	for (unsigned i = 0; i < 3; i++) /* and dearer altogether: known after a few, not after a window */
		aq_cost_learn(entry, 100 * MS);
	CHECK(aq_cost_estimate(entry, 0) > MS);
}

/* All samples count for the function too, so that grids without end are known, and grids for which there is no room. */
static void a_grid_without_samples_costs_what_the_function_does(void)
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

static void a_full_table_answers_with_the_fallback(void)
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
		unsigned sampled[2] = {0};

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

/* Costs that are believed half of what they are: without the correction the tenant would get twice its share. */
static void controller_removes_a_bias_of_the_cost(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND, end = now + 60 * SECOND, busy = 0, busy_last = 0, measured_at = now;
	int64_t settled_from = now + 30 * SECOND, busy_settled = 0;
	while (now < end) {
		if (aq_bucket_pay(&bucket, now, 30, MS / 2)) {
			now += MS;
			busy += MS;
			busy_settled += now > settled_from ? MS : 0;
		} else {
			now += aq_bucket_wait_ns(&bucket, 30);
		}
		if (now - measured_at >= AQ_CONTROL_PERIOD_NS && aq_control_take_lease(&bucket, now, true)) {
			uint32_t measured = (uint32_t)((busy - busy_last) * AQ_GAIN_ONE / (now - measured_at));
			aq_control_correct(&bucket, now, 1, 30, measured);
			busy_last = busy;
			measured_at = now;
		}
	}
	double share = (double)busy_settled / (double)(end - settled_from);
	CHECK(share > 0.295 && share < 0.305);
}

static uint32_t gain(const struct aq_bucket *bucket)
{
	uint32_t set = atomic_load(&bucket->gain_q16);
	return set ? set : AQ_GAIN_ONE;
}

/* Who pays so little that what flows in is always enough never waits; what it uses is too much all the same. */
static void who_pays_too_little_to_wait_is_corrected_too(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND, end = now + 60 * SECOND, busy = 0, busy_last = 0, measured_at = now;
	int64_t settled_from = now + 40 * SECOND, busy_settled = 0;
	while (now < end) {
		bool has_paid = aq_bucket_pay(&bucket, now, 25, MS / 8);
		uint32_t periods = aq_control_take_lease(&bucket, now, !has_paid);
		if (periods) {
			uint32_t measured = now > measured_at ? (uint32_t)((busy - busy_last) * AQ_GAIN_ONE / (now - measured_at)) : 0;
			aq_control_correct(&bucket, now, periods, 25, measured);
			busy_last = busy;
			measured_at = now;
		}
		busy += has_paid ? MS : 0;
		busy_settled += has_paid && now > settled_from ? MS : 0;
		now += has_paid ? MS : aq_bucket_wait_ns(&bucket, 25);
	}
	double share = (double)busy_settled / (double)(end - settled_from);
	CHECK(share > 0.24 && share < 0.26);
}

/* … and as soon as if it waited, though it is measured more seldom. */
static void who_pays_too_little_to_wait_is_corrected_in_two_seconds(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND;

	for (unsigned i = 0; i < 5; i++, now += AQ_CONTROL_UNHELD_NS)
		aq_control_correct(&bucket, now, aq_control_take_lease(&bucket, now, false), 25, AQ_GAIN_ONE);
	CHECK(gain(&bucket) < AQ_GAIN_ONE / 5);
}

static void who_uses_less_than_its_share_saves_up_no_gain(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND;

	for (unsigned i = 0; i < 100; i++, now += AQ_CONTROL_UNHELD_NS) {
		CHECK(aq_control_take_lease(&bucket, now + AQ_CONTROL_PERIOD_NS, false));
		CHECK(!aq_control_take_lease(&bucket, now + AQ_CONTROL_UNHELD_NS, false));
		aq_control_correct(&bucket, now, AQ_CONTROL_UNHELD_NS / AQ_CONTROL_PERIOD_NS, 50, AQ_GAIN_ONE / 10);
	}
	CHECK(gain(&bucket) == AQ_GAIN_ONE);
}

/* One period of a tenant that waits all the time; the driver says it had `measured_percent` of the device. */
static int64_t period(struct aq_bucket *bucket, int64_t now, uint32_t percent, uint32_t measured_percent)
{
	atomic_store(&bucket->starved_at_ns, now);
	if (aq_control_take_lease(bucket, now, true))
		aq_control_correct(bucket, now, 1, percent, measured_percent * AQ_GAIN_ONE / 100);
	return now + AQ_CONTROL_PERIOD_NS;
}

/* What a tenant used while nothing held it is not held against it afterwards. */
static void a_new_ceiling_is_not_corrected_by_what_was_used_under_another(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND;
	for (int i = 0; i < 20; i++)
		now = period(&bucket, now, 50, 50);
	CHECK(gain(&bucket) == AQ_GAIN_ONE);
	for (unsigned i = 0; i < AQ_CONTROL_STALE; i++) /* the driver's samples still tell of before */
		now = period(&bucket, now, 5, 50);
	CHECK(gain(&bucket) == AQ_GAIN_ONE);
	now = period(&bucket, now, 5, 5);
	CHECK(gain(&bucket) == AQ_GAIN_ONE);
	now = period(&bucket, now, 5, 10); /* but too much is too much */
	CHECK(gain(&bucket) < AQ_GAIN_ONE);
}

static void a_ceiling_that_comes_and_goes_is_not_corrected_by_what_was_used_between(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND;
	for (int i = 0; i < 100; i++) {
		now = period(&bucket, now, 5, i % 3 ? 5 : 60);
		if (i % 3 == 2)
			aq_control_interrupted(&bucket);
	}
	CHECK(gain(&bucket) == AQ_GAIN_ONE);
	now = period(&bucket, now, 5, 5) + 10 * SECOND; /* nothing waited for a while: the same */
	for (unsigned i = 0; i < AQ_CONTROL_STALE; i++)
		now = period(&bucket, now, 5, 60);
	CHECK(gain(&bucket) == AQ_GAIN_ONE);
}

/* The last share measured before a steady state of a slowly moving ceiling is near enough to count. */
static void a_ceiling_that_moves_a_little_is_corrected_all_along(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND;
	for (uint32_t i = 0; i < 40; i++)
		now = period(&bucket, now, 30 + i % 4, 45);
	CHECK(gain(&bucket) < AQ_GAIN_ONE * 7 / 10);
}

static void one_period_moves_the_gain_by_a_tenth_at_most(void)
{
	struct aq_bucket bucket = {0};
	int64_t now = SECOND;
	for (unsigned i = 0; i < AQ_CONTROL_STALE; i++)
		now = period(&bucket, now, 2, 2);
	period(&bucket, now, 2, 100);
	CHECK(gain(&bucket) >= AQ_GAIN_ONE * 9 / 10 - 1);
}

static void low_priority_trickles_while_the_device_is_wanted(void)
{
	struct aq_priority_own own = {0};
	int64_t said = 0;

	CHECK(aq_priority_percent(said, SECOND, 40) == 40);
	for (unsigned i = 0; i < 2; i++) {
		CHECK(aq_priority_want(&own, SECOND, 20 * MS));
		said = aq_priority_tell(&own, said, SECOND);
	}
	CHECK(aq_priority_percent(said, SECOND + 49 * MS, 40) == AQ_PRIORITY_TRICKLE_PERCENT);
	CHECK(aq_priority_percent(said, SECOND + 49 * MS, 0) == AQ_PRIORITY_TRICKLE_PERCENT);
	CHECK(aq_priority_percent(said, SECOND + 49 * MS, 2) == 2);
	CHECK(aq_priority_percent(said, SECOND + 51 * MS, 40) == 40);
	CHECK(aq_priority_want(&own, 2 * SECOND, 3600 * SECOND));
	CHECK(aq_priority_percent(aq_priority_tell(&own, said, 2 * SECOND), 3 * SECOND + 11 * MS, 40) == 40);
	CHECK(aq_priority_percent(INT64_MIN, SECOND, 40) == 40);
	CHECK(aq_priority_percent(INT64_MAX, SECOND, 40) == 40);
}

static void short_launches_are_told_together_and_never_late(void)
{
	struct aq_priority_own own = {0};
	int64_t said = 0, done = 0, now = SECOND;
	unsigned told = 0;

	for (unsigned i = 0; i < 100000; i++, now += 5000) { /* half a second of launches that take 4 us every 5 us */
		done = (done > now ? done : now) + 4000;
		if (aq_priority_want(&own, now, 4000)) {
			said = aq_priority_tell(&own, said, now);
			told++;
		}
		CHECK(said <= done && done - said <= AQ_PRIORITY_LATE_NS);
	}
	CHECK(told > 1000 && told < 2100);
	now += 100 * MS;
	CHECK(aq_priority_want(&own, now, 4000)); /* at once after a rest */
}

static void work_of_several_adds_up_and_what_was_lost_is_told_again(void)
{
	struct aq_priority_own one = {0}, other = {0};
	int64_t said = 0;

	CHECK(aq_priority_want(&one, SECOND, 300 * MS) && aq_priority_want(&other, SECOND, 10 * MS));
	said = aq_priority_tell(&one, said, SECOND);
	said = aq_priority_tell(&other, said, SECOND);
	CHECK(said == SECOND + 310 * MS);
	CHECK(aq_priority_want(&one, SECOND + MS, MS)); /* the page was cut off and made anew meanwhile */
	CHECK(aq_priority_tell(&one, 0, SECOND + MS) == SECOND + 301 * MS);
}

static void who_comes_under_a_ceiling_has_saved_nothing_before(void)
{
	struct aq_bucket bucket = {0};

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

/* One device, and processes that submit kernels of one length for ever, as many as they may, and look for progress all the time. */
struct device {
	unsigned sharers;
	int64_t kernel_ns;
	int64_t paid_ns;  /* for each kernel */
	int64_t slice_ns; /* the device is theirs in turns of that length; 0 = all share it evenly at each moment */
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
	for (unsigned i = 0; i < device->sharers && device->slice_ns && (now >= device->turn_ends_ns || left_to(device, device->turn) <= 0); i++) {
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

static void processes_together_have_in_flight_what_one_has_and_the_device_is_never_idle(void)
{
	const unsigned sharers[] = {1, 2, 8, 16};
	const int64_t kernels[] = {20000, 200000}, slices[] = {0, 2 * MS};

	for (size_t n = 0; n < sizeof sharers / sizeof *sharers; n++)
		for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++)
			for (size_t s = 0; s < sizeof slices / sizeof *slices; s++) {
				struct device device = {.sharers = sharers[n], .kernel_ns = kernels[k], .paid_ns = kernels[k], .slice_ns = slices[s]};

				CHECK(most_in_flight(&device, SECOND) <= (slices[s] ? 2 : 1) * AQ_IN_FLIGHT_NS + kernels[k]);
				CHECK(device.idle_ns == 0);
			}
}

static void what_is_in_flight_is_bounded_also_when_launches_cost_more_than_is_paid(void)
{
	struct device device = {.sharers = 2, .kernel_ns = 200000, .paid_ns = 20000};

	CHECK(most_in_flight(&device, SECOND) <= AQ_IN_FLIGHT_NS + 200000);
	CHECK(device.idle_ns == 0);
}

static void who_is_left_alone_has_the_device_to_itself(void)
{
	struct device device = {.sharers = 16, .kernel_ns = 20000, .paid_ns = 20000};

	most_in_flight(&device, SECOND);
	CHECK(aq_in_flight_part(&device.flight[0]) < AQ_PART_ONE / 8);
	device.sharers = 1;
	CHECK(most_in_flight(&device, 2 * SECOND) > AQ_IN_FLIGHT_NS * 9 / 10);
	CHECK(device.idle_ns == 0);
}

static void a_long_launch_goes_alone_and_is_waited_for_as_long_as_it_may_take(void)
{
	struct aq_in_flight flight = {0};
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

static void who_rests_keeps_the_part_it_had(void)
{
	struct aq_in_flight flight = {0};

	aq_in_flight_look(&flight, SECOND);
	flight.submitted_ns = 2 * MS;
	aq_in_flight_look(&flight, 3 * SECOND); /* it did not look, so it did not launch */
	CHECK(aq_in_flight_part(&flight) == AQ_PART_ONE);
	flight.finished_ns = 2 * MS;
	aq_in_flight_look(&flight, 3 * SECOND + 8 * MS); /* all is finished, nobody knows since when */
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
	scribbled_bucket_neither_hangs_nor_overflows();
	cost_is_the_recent_minimum_and_forgets();
	a_cost_is_no_less_than_an_eighth_of_the_mean();
	a_grid_without_samples_costs_what_the_function_does();
	a_full_table_answers_with_the_fallback();
	samples_fall_on_every_part_of_a_round();
	new_kernels_are_sampled_often_and_known_ones_rarely();
	controller_removes_a_bias_of_the_cost();
	who_pays_too_little_to_wait_is_corrected_too();
	who_pays_too_little_to_wait_is_corrected_in_two_seconds();
	who_uses_less_than_its_share_saves_up_no_gain();
	a_new_ceiling_is_not_corrected_by_what_was_used_under_another();
	a_ceiling_that_comes_and_goes_is_not_corrected_by_what_was_used_between();
	a_ceiling_that_moves_a_little_is_corrected_all_along();
	one_period_moves_the_gain_by_a_tenth_at_most();
	low_priority_trickles_while_the_device_is_wanted();
	short_launches_are_told_together_and_never_late();
	work_of_several_adds_up_and_what_was_lost_is_told_again();
	who_comes_under_a_ceiling_has_saved_nothing_before();
	processes_together_have_in_flight_what_one_has_and_the_device_is_never_idle();
	what_is_in_flight_is_bounded_also_when_launches_cost_more_than_is_paid();
	who_is_left_alone_has_the_device_to_itself();
	a_long_launch_goes_alone_and_is_waited_for_as_long_as_it_may_take();
	who_rests_keeps_the_part_it_had();
	return 0;
}
