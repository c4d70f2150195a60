#include "limit/bucket.h"

#define REFILL_MAX_NS 1000000000ll /* more than this in one step is an idle gap; it would be capped anyway */

/* The region is the tenant's to scribble on, so no word of it may overflow a sum or stop the inflow for good. */
static uint32_t gain_of(const struct aq_bucket *bucket)
{
	uint32_t gain = atomic_load_explicit(&bucket->gain_q16, memory_order_relaxed);
	return gain == 0 || gain > AQ_GAIN_MAX ? AQ_GAIN_ONE : gain;
}

static int64_t difference(int64_t a, int64_t b)
{
	return (int64_t)((uint64_t)a - (uint64_t)b);
}

static int64_t inflow_ns(int64_t elapsed_ns, uint32_t percent, uint32_t gain_q16)
{
	/* One division at the end: short steps would lose all they bring to an earlier one. */
	return elapsed_ns * percent * gain_q16 / (100 * (int64_t)AQ_GAIN_ONE);
}

void aq_bucket_refill(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent)
{
	int64_t last = atomic_load_explicit(&bucket->refilled_at_ns, memory_order_relaxed);
	bool nonsense = difference(last, now_ns) > REFILL_MAX_NS; /* scribbled: taken as a bucket that was never filled */
	if (now_ns <= last && !nonsense)               /* another process was there a moment later */
		return;
	/* Exactly one payer wins each interval; the loser's time is part of the winner's or of the next one. */
	if (!atomic_compare_exchange_strong_explicit(&bucket->refilled_at_ns, &last, now_ns, memory_order_relaxed,
						     memory_order_relaxed))
		return;
	int64_t elapsed = last == 0 || nonsense ? 0 : difference(now_ns, last);
	if (elapsed > REFILL_MAX_NS || elapsed < 0)
		elapsed = REFILL_MAX_NS;
	int64_t add = inflow_ns(elapsed, percent, gain_of(bucket));
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	int64_t filled;
	do {
		/* A container that scribbled over its own balance gets the cap, not a free run. */
		filled = balance > AQ_BUCKET_CAP_NS - add ? AQ_BUCKET_CAP_NS : balance + add;
	} while (!atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, filled, memory_order_relaxed,
							memory_order_relaxed));
}

bool aq_bucket_pay(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent, int64_t cost_ns)
{
	int64_t last = atomic_load_explicit(&bucket->refilled_at_ns, memory_order_relaxed);
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	if (balance < 0 || difference(now_ns, last) >= AQ_BUCKET_REFILL_EVERY_NS) {
		aq_bucket_refill(bucket, now_ns, percent);
		balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	}
	do {
		if (balance < 0) {
			atomic_store_explicit(&bucket->starved_at_ns, now_ns, memory_order_relaxed);
			return false;
		}
	} while (!atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, balance - cost_ns,
							memory_order_relaxed, memory_order_relaxed));
	atomic_fetch_add_explicit(&bucket->paid_ns, (uint64_t)cost_ns, memory_order_relaxed);
	return true;
}

void aq_bucket_interrupted(struct aq_bucket *bucket)
{
	if (atomic_load_explicit(&bucket->refilled_at_ns, memory_order_relaxed))
		atomic_store_explicit(&bucket->refilled_at_ns, 0, memory_order_relaxed);
}

void aq_bucket_spill(struct aq_bucket *bucket, int64_t most_ns)
{
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);

	while (balance > most_ns && !atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, most_ns, memory_order_relaxed,
									   memory_order_relaxed))
		;
}

void aq_bucket_give_back(struct aq_bucket *bucket, int64_t unused_ns)
{
	atomic_fetch_add_explicit(&bucket->balance_ns, unused_ns, memory_order_relaxed);
	atomic_fetch_sub_explicit(&bucket->paid_ns, (uint64_t)unused_ns, memory_order_relaxed);
}

int64_t aq_bucket_wait_ns(const struct aq_bucket *bucket, uint32_t percent)
{
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	if (balance >= 0)
		return 0;
	if (balance < -REFILL_MAX_NS * 100)
		balance = -REFILL_MAX_NS * 100; /* nonsense in the region must not overflow the product */
	int64_t rate = (int64_t)percent * gain_of(bucket); /* of 100 x AQ_GAIN_ONE */
	return rate == 0 ? REFILL_MAX_NS : -balance * 100 * (int64_t)AQ_GAIN_ONE / rate + 1;
}
