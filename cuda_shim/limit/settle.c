/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/settle.h"

#define LEFT_MOST_NS 60000000000ll
#define FALL 4 /* the price of unknown launches rises at once and falls by a quarter of the difference */

int64_t aq_settle_unknown_price(const struct aq_settlement *settlement)
{
	int64_t price = atomic_load_explicit(&settlement->unknown_ns, memory_order_relaxed);

	/* the tenant can write anything there */
	return price > 0 && price <= AQ_SETTLE_UNKNOWN_MOST_NS ? price : AQ_SETTLE_UNKNOWN_NS;
}

void aq_settle_unknown_took(struct aq_settlement *settlement, int64_t took_ns)
{
	int64_t price = aq_settle_unknown_price(settlement);

	price = took_ns > price ? took_ns : price - (price - took_ns) / FALL;
	if (price > AQ_SETTLE_UNKNOWN_MOST_NS)
		price = AQ_SETTLE_UNKNOWN_MOST_NS;
	atomic_store_explicit(&settlement->unknown_ns, price > 0 ? price : 1, memory_order_relaxed);
}

int64_t aq_settle_owed(enum aq_price price, int64_t paid_ns, int64_t took_ns)
{
	if (price == AQ_PRICE_KNOWN && took_ns / AQ_SETTLE_FACTOR < paid_ns)
		return 0;
	return took_ns - paid_ns;
}

int64_t aq_settle_orphan(int64_t since_ns, int64_t now_ns)
{
	int64_t ran_ns = (int64_t)((uint64_t)now_ns - (uint64_t)since_ns);

	if (since_ns <= 0 || ran_ns <= 0)
		return 0;
	return ran_ns < AQ_SETTLE_ORPHAN_NS ? ran_ns : AQ_SETTLE_ORPHAN_NS;
}

void aq_flight_time_begin(struct aq_flight_time *time, int64_t now_ns)
{
	if (!time->looked_ns)
		time->looked_ns = now_ns;
}

void aq_flight_time_look(struct aq_flight_time *time, int64_t now_ns)
{
	if (!time->looked_ns || now_ns <= time->looked_ns)
		return;
	time->left_ns += now_ns - time->looked_ns;
	if (time->left_ns > LEFT_MOST_NS)
		time->left_ns = LEFT_MOST_NS;
	time->looked_ns = now_ns;
}

void aq_flight_time_end(struct aq_flight_time *time)
{
	*time = (struct aq_flight_time){ 0 };
}

int64_t aq_flight_time_take(struct aq_flight_time *time, int64_t measured_ns)
{
	int64_t taken = measured_ns < time->left_ns ? measured_ns : time->left_ns;

	time->left_ns -= taken;
	return taken;
}
