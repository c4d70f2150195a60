/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/bucket.h"

#define AHEAD_MAX_NS 1000000000ll     /* a refill further in the future is not another process's */
#define REFILL_MAX_NS 10000000000000ll /* in one step: hours, in which any debt is worked off */
#define WAIT_MAX_NS 1000000000ll

/* A tenant can write anything to the region, so no word of it may overflow a sum or stop the inflow permanently. */
static int64_t sane(int64_t balance_ns)
{
	return balance_ns < AQ_BUCKET_FLOOR_NS ? 0 : balance_ns;
}

static int64_t difference(int64_t a, int64_t b)
{
	return (int64_t)((uint64_t)a - (uint64_t)b);
}

/* Two at once may lose one's part. */
static void keep_spilled(struct aq_bucket *bucket, int64_t above_ns, int64_t most_ns)
{
	int64_t kept = atomic_load_explicit(&bucket->spilled_ns, memory_order_relaxed);

	kept = kept < 0 || kept > most_ns ? 0 : kept;
	atomic_store_explicit(&bucket->spilled_ns, kept < most_ns - above_ns ? kept + above_ns : most_ns, memory_order_relaxed);
}

/* The part of a debt that was spilled. */
static int64_t take_spilled(struct aq_bucket *bucket, int64_t owed_ns)
{
	int64_t kept = atomic_exchange_explicit(&bucket->spilled_ns, 0, memory_order_relaxed);

	if (kept < 0 || kept > AQ_BUCKET_SPILL_NS)
		return 0;
	if (kept > owed_ns)
		atomic_store_explicit(&bucket->spilled_ns, kept - owed_ns, memory_order_relaxed);
	return kept < owed_ns ? kept : owed_ns;
}

void aq_bucket_refill(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent)
{
	int64_t last = atomic_load_explicit(&bucket->refilled_at_ns, memory_order_relaxed);
	bool nonsense = difference(last, now_ns) > AHEAD_MAX_NS; /* scribbled: taken as a bucket that was never filled */
	if (now_ns <= last && !nonsense)              /* another process was there a moment later */
		return;
	/* Exactly one payer wins each interval; the loser's time is part of the winner's or of the next one. */
	if (!atomic_compare_exchange_strong_explicit(&bucket->refilled_at_ns, &last, now_ns, memory_order_relaxed, memory_order_relaxed))
		return;
	int64_t elapsed = last == 0 || nonsense ? 0 : difference(now_ns, last);
	if (elapsed > REFILL_MAX_NS || elapsed < 0)
		elapsed = REFILL_MAX_NS;
	int64_t add = elapsed * percent / 100;
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	int64_t filled, above;
	do {
		/* A container that scribbled over its own balance gets the cap, not a free run. */
		above = balance > AQ_BUCKET_CAP_NS ? add : sane(balance) + add - AQ_BUCKET_CAP_NS;
		filled = above >= 0 ? AQ_BUCKET_CAP_NS : sane(balance) + add;
	} while (!atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, filled, memory_order_relaxed, memory_order_relaxed));
	if (above > 0)
		keep_spilled(bucket, above, AQ_BUCKET_SPILL_NS * percent / 100);
}

bool aq_bucket_pay(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent, int64_t cost_ns)
{
	int64_t last = atomic_load_explicit(&bucket->refilled_at_ns, memory_order_relaxed);
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	if (balance < 0 || balance > AQ_BUCKET_CAP_NS || difference(now_ns, last) >= AQ_BUCKET_REFILL_EVERY_NS) {
		aq_bucket_refill(bucket, now_ns, percent);
		balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	}
	do {
		if (balance < 0) {
			atomic_store_explicit(&bucket->starved_at_ns, now_ns, memory_order_relaxed);
			return false;
		}
	} while (!atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, balance - cost_ns, memory_order_relaxed,
							memory_order_relaxed));
	atomic_fetch_add_explicit(&bucket->paid_ns, (uint64_t)cost_ns, memory_order_relaxed);
	return true;
}

void aq_bucket_interrupted(struct aq_bucket *bucket)
{
	if (atomic_load_explicit(&bucket->refilled_at_ns, memory_order_relaxed))
		atomic_store_explicit(&bucket->refilled_at_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&bucket->spilled_ns, 0, memory_order_relaxed);
}

void aq_bucket_spill(struct aq_bucket *bucket, int64_t most_ns)
{
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);

	while (balance > most_ns &&
	       !atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, most_ns, memory_order_relaxed, memory_order_relaxed))
		;
	atomic_store_explicit(&bucket->spilled_ns, 0, memory_order_relaxed);
}

static int64_t settled(int64_t balance_ns, int64_t owed_ns)
{
	int64_t after = (balance_ns > AQ_BUCKET_CAP_NS ? AQ_BUCKET_CAP_NS : sane(balance_ns)) - owed_ns;

	return after > AQ_BUCKET_CAP_NS ? AQ_BUCKET_CAP_NS : after < AQ_BUCKET_FLOOR_NS ? AQ_BUCKET_FLOOR_NS : after;
}

void aq_bucket_settle(struct aq_bucket *bucket, int64_t owed_ns)
{
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed);
	int64_t taken = owed_ns > 0 ? owed_ns - take_spilled(bucket, owed_ns) : owed_ns;

	while (!atomic_compare_exchange_weak_explicit(&bucket->balance_ns, &balance, settled(balance, taken), memory_order_relaxed,
						      memory_order_relaxed))
		;
	atomic_fetch_add_explicit(&bucket->paid_ns, (uint64_t)owed_ns, memory_order_relaxed);
}

int64_t aq_bucket_wait_ns(const struct aq_bucket *bucket, uint32_t percent)
{
	int64_t balance = sane(atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed));

	if (balance >= 0)
		return 0;
	return percent == 0 ? WAIT_MAX_NS : -balance * 100 / percent + 1;
}
