/* SPDX-License-Identifier: Apache-2.0 */
/* Paid is what was used: a launch pays what it is thought to cost, and settles the difference when it was timed.
 *
 * A launch is known when its function and shape were timed before. It pays what they cost lately, and its own time says little: a neighbour
 * may have stretched it. So a known launch settles only when it took many times what it paid; the driver's figures (control.h) take care of
 * the rest. If launches of its kind take very different times, a timed one settles all. One that is not known is always timed, and settles
 * all. Before that it pays what such launches of the container cost lately, by a word of the region: so a program that begins again and
 * again pays as one that goes on. Few of them are in flight at once.
 *
 * Timed durations overlap where streams run at the same time. So together they count for no more than the time in which the process had
 * timed launches in flight. Of a long launch the time that it has run so far is settled while it runs.
 *
 * What a process that is killed leaves unsettled is paid by the next one that takes its slot (region.c): the time since the launch that was
 * not paid then, up to AQ_SETTLE_ORPHAN_NS.
 *
 * Pure: times are arguments, in nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef AQ_LIMIT_SETTLE_H
#define AQ_LIMIT_SETTLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_SETTLE_UNKNOWN_NS 1000000ll     /* the price of an unknown launch before any was timed */
#define AQ_SETTLE_UNKNOWN_MOST_NS 10000000000ll
#define AQ_SETTLE_RUNNING_NS 1000000000ll  /* most that is settled of a launch that still runs: what it waits for may be another launch */
#define AQ_SETTLE_ORPHAN_NS 500000000ll
#define AQ_SETTLE_FACTOR 8                 /* a known launch that took longer than so many times its price was another kind of work */
#define AQ_SETTLE_UNKNOWN_AT_ONCE 1u       /* launches in flight that nothing is known of … */
#define AQ_SETTLE_PREDICTED_AT_ONCE 4u     /* … or only what other shapes of their function cost */
#define AQ_SETTLE_BEGIN_NS 20000000ll      /* how long they wait for each other where none begins: then what they wait for is to come */

/* In the device's line of the region, after its memory. All zero is valid. */
struct aq_settlement {
	_Atomic uint64_t seen_us;      /* the driver's clock, of the newest figure that was settled */
	_Atomic int64_t paid_seen_ns;  /* of builds of ABI 1.4; not read */
	_Atomic int64_t owed_ns;       /* what the driver measured beyond what was paid; below zero: paid ahead */
	_Atomic int64_t unknown_ns;    /* what unknown launches cost lately; 0 = none was timed */
	_Atomic int64_t ended_named_ns; /* CLOCK_MONOTONIC when a figure last named a process that had ended; 0 = none did */
};

/* One process's payments on one device, and how far the driver's figures have covered them (control.h). In its row of the region. All zero
 * is valid. */
struct aq_compared {
	_Atomic int64_t seen_ns;      /* what it had paid at closed_at_ns, or what figures have covered since … */
	_Atomic int64_t pending_ns;   /* … and of that, what no figure has covered yet: it may be for work that is still to be done */
	_Atomic int64_t closed_at_ns; /* CLOCK_MONOTONIC */
};

/* How a launch was priced. */
enum aq_price {
	AQ_PRICE_KNOWN,
	AQ_PRICE_UNEVEN,    /* known, but such launches take very different times */
	AQ_PRICE_PREDICTED, /* by other shapes of the function */
	AQ_PRICE_UNKNOWN,
};

/* The price of an unknown launch. */
int64_t aq_settle_unknown_price(const struct aq_settlement *settlement);
/* One was timed. */
void aq_settle_unknown_took(struct aq_settlement *settlement, int64_t took_ns);

/* What a launch owes beyond what it paid, having taken, or run for, `took_ns`; below zero: it gets that back. */
int64_t aq_settle_owed(enum aq_price price, int64_t paid_ns, int64_t took_ns);

/* What is left of a dead process's launch that is paid up to the time `since_ns`, and was not settled; 0 = there is no such launch. */
int64_t aq_settle_orphan(int64_t since_ns, int64_t now_ns);

/* The time in which one process had timed launches in flight, less what they have been counted for. */
struct aq_flight_time {
	int64_t looked_ns; /* 0 = nothing is in flight */
	int64_t left_ns;
};

/* A timed launch is made; before and after the others have been looked at; nothing timed is in flight any more. */
void aq_flight_time_begin(struct aq_flight_time *time, int64_t now_ns);
void aq_flight_time_look(struct aq_flight_time *time, int64_t now_ns);
void aq_flight_time_end(struct aq_flight_time *time);
/* The part of a measured duration that counts. */
int64_t aq_flight_time_take(struct aq_flight_time *time, int64_t measured_ns);

#endif
