/* SPDX-License-Identifier: Apache-2.0 */
/* The compute bucket of one container on one device: GPU time as a currency.
 *
 * Time flows in at the container's share of the wall clock and is paid out per launch in estimated GPU time. What a launch took beyond its
 * estimate is taken afterwards (limit/settle.h). The bucket is in the container's region, so all its processes draw from one, and pay what
 * an ended one left; every operation is a few atomics and waits for no other process. Time is an argument (nanoseconds of
 * CLOCK_MONOTONIC), so that tests control it.
 *
 * A payer is admitted while the balance is not negative and may then take it below zero: a long kernel runs whole and is worked off
 * afterwards. The balance never exceeds AQ_BUCKET_CAP_NS, so that an idle container cannot save up a burst. What flows in above that is
 * kept apart for AQ_BUCKET_SPILL_NS: a container that paid too little, so that its bucket was full although it worked, gets that off its
 * debt. The balance is never below AQ_BUCKET_FLOOR_NS: a tenant wrote such a value itself, and it counts as zero, so that every wait ends.
 */
#ifndef AQ_LIMIT_BUCKET_H
#define AQ_LIMIT_BUCKET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_BUCKET_CAP_NS 5000000ll         /* most credit an idle container keeps: 5 ms of GPU time */
#define AQ_BUCKET_FLOOR_NS (-600000000000ll) /* largest debt: ten minutes of GPU time */
#define AQ_BUCKET_SPILL_NS 400000000ll /* of the inflow */
#define AQ_BUCKET_REFILL_EVERY_NS 200000ll /* a thread with credit left refills no more often than this */

/* One cache line of the region, written by every process of the container. All zero is a valid new bucket. */
struct aq_bucket {
	_Alignas(64) _Atomic int64_t balance_ns;
	_Atomic int64_t refilled_at_ns;  /* 0 = never; the winner of the exchange adds the time since */
	_Atomic int64_t starved_at_ns;   /* when a payer last found the balance negative */
	_Atomic int64_t lease_until_ns;  /* one process at a time compares with the driver's figures; see control.h */
	_Atomic uint64_t paid_ns;        /* GPU time paid since the container started, with what was settled */
	_Atomic uint32_t gain_q16;       /* these three are of builds up to ABI 1.3, which correct the inflow; not read */
	_Atomic int32_t integral_q16;
	_Atomic uint32_t measured_q16;
	/* the ceiling of the measurements, and how many of the next ones still reflect a time without one; 0 = no ceiling */
	_Atomic uint32_t regime;
	_Atomic int64_t spilled_ns; /* what flowed in lately above the cap: for debts alone */
};
_Static_assert(sizeof(struct aq_bucket) == 64, "the bucket is one cache line of the region ABI");

/* Let the time since the last refill flow in, at `percent` of the wall clock. */
void aq_bucket_refill(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent);

/* Take `cost_ns` if the balance allows; false = wait aq_bucket_wait_ns() and try again. */
bool aq_bucket_pay(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent, int64_t cost_ns);

/* No ceiling applies now: nothing flows in from here to the next refill. */
void aq_bucket_interrupted(struct aq_bucket *bucket);

/* Keep at most this much credit. */
void aq_bucket_spill(struct aq_bucket *bucket, int64_t most_ns);

/* Take what was used beyond what was paid, as a debt; below zero give back, up to the cap. */
void aq_bucket_settle(struct aq_bucket *bucket, int64_t owed_ns);

/* Nanoseconds until the inflow will have lifted a negative balance to zero; 0 when it is not negative. */
int64_t aq_bucket_wait_ns(const struct aq_bucket *bucket, uint32_t percent);

#endif
