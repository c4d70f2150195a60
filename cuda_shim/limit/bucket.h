/* The compute bucket of one container on one device: GPU time as a currency.
 *
 * Time flows in at the container's share of the wall clock and is paid out per launch in estimated GPU time. The bucket lies in
 * the container's region, so all its processes draw from one; every operation is a few atomics, none waits for another
 * process. Time is an argument (nanoseconds of CLOCK_MONOTONIC), so that tests decide what it is.
 *
 * A payer is admitted while the balance is not negative and may then take it below zero: a long kernel runs whole and is worked off
 * afterwards. The balance never exceeds AQ_BUCKET_CAP_NS, so that an idle container cannot save up a burst.
 */
#ifndef AQ_LIMIT_BUCKET_H
#define AQ_LIMIT_BUCKET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_GAIN_ONE 65536u                 /* gain 1.0 in Q16 */
#define AQ_GAIN_MAX (2 * AQ_GAIN_ONE)      /* the controller's upper bound */
#define AQ_BUCKET_CAP_NS 5000000ll         /* most credit an idle container keeps: 5 ms of GPU time */
#define AQ_BUCKET_REFILL_EVERY_NS 200000ll /* a payer with credit left refills no more often than this */

/* One cache line of the region, written by every process of the container. All zero is a valid new bucket. */
struct aq_bucket {
	_Alignas(64) _Atomic int64_t balance_ns;
	_Atomic int64_t refilled_at_ns;  /* 0 = never; the winner of the exchange adds the time since */
	_Atomic int64_t starved_at_ns;   /* when a payer last found the balance negative */
	_Atomic int64_t lease_until_ns;  /* one process at a time corrects the gain; see control.h */
	_Atomic uint64_t paid_ns;        /* GPU time paid since the container started */
	_Atomic uint32_t gain_q16;       /* correction of the inflow; 0 = not set, means 1.0 */
	_Atomic int32_t integral_q16;    /* the controller's memory */
	_Atomic uint32_t measured_q16;   /* smoothed share of the device measured for the container */
	_Atomic uint32_t regime;         /* the ceiling that the measurements are of, and how many of them still tell of before; 0 = of none */
};
_Static_assert(sizeof(struct aq_bucket) == 64, "the bucket is one cache line of the region ABI");

/* Let the time since the last refill flow in, at `percent` of the wall clock times the gain. */
void aq_bucket_refill(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent);

/* Take `cost_ns` if the balance allows; false = wait aq_bucket_wait_ns() and try again. */
bool aq_bucket_pay(struct aq_bucket *bucket, int64_t now_ns, uint32_t percent, int64_t cost_ns);

/* No ceiling holds now: from here to the next refill nothing flows in. */
void aq_bucket_interrupted(struct aq_bucket *bucket);

/* Keep no more credit than so much. */
void aq_bucket_spill(struct aq_bucket *bucket, int64_t most_ns);

/* Give back what was taken and not used. */
void aq_bucket_give_back(struct aq_bucket *bucket, int64_t unused_ns);

/* Nanoseconds until the inflow will have lifted a negative balance to zero; 0 when it is not negative. */
int64_t aq_bucket_wait_ns(const struct aq_bucket *bucket, uint32_t percent);

#endif
