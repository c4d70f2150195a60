/* The slow correction of the compute bucket: measured utilisation trims the inflow.
 *
 * Event-timed costs are right within milliseconds but have a bias: concurrent kernels overlap, device-side launches are invisible,
 * a neighbour stretches what is timed. The driver's own utilisation figures have none, but come late. So an integrator
 * moves the gain of the inflow slowly: up only while the container is throttled (else it would wind up), down also while it is not, for who pays
 * too little may never have to wait.
 *
 * A measurement comes after the fact. When the ceiling changed much, or nothing was throttled for a while, the next ones tell of what was before:
 * they are passed over. And one period moves the gain by a tenth at most, down as up: a container that had the whole device and is held at a
 * twentieth of it must not be throttled to nothing for what it had.
 *
 * One process of the container does it at a time: whoever takes the lease, at a moment when it has to wait anyway; while none has, more
 * seldom, and each time for all the periods since the last one. Else who pays so little that it never waits would have the device for
 * seconds.
 */
#ifndef AQ_LIMIT_CONTROL_H
#define AQ_LIMIT_CONTROL_H

#include "limit/bucket.h"

#define AQ_CONTROL_PERIOD_NS 100000000ll /* 100 ms */
#define AQ_CONTROL_UNHELD_NS 400000000ll /* while nothing waits: it holds a launch up */
#define AQ_CONTROL_GAP_NS 1000000000ll   /* as long without a measurement, and the correction starts anew */
#define AQ_CONTROL_STALE 3u              /* periods passed over then: the driver's samples are up to two wide */

/* For the one caller that shall measure now, how many periods that is for: it holds the lease for the next one. 0 for others. `is_held`: it
 * has to wait. */
uint32_t aq_control_take_lease(struct aq_bucket *bucket, int64_t now_ns, bool is_held);

/* The container is not held at any ceiling now: what is measured from here on tells nothing about one. */
void aq_control_interrupted(struct aq_bucket *bucket);

/* Fold one measurement in: `measured_q16` is the container's share of the device's time since the last one (65536 = all of it). */
void aq_control_correct(struct aq_bucket *bucket, int64_t now_ns, uint32_t periods, uint32_t percent, uint32_t measured_q16);

#endif
