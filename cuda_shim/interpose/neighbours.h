/* SPDX-License-Identifier: Apache-2.0 */
/* What this container exchanges with the containers on the same device, over the node's pages: which container wants the device
 * first (limit/priority.h), and which one has its time slot (limit/turns.h). A missing or damaged page counts as having no neighbours.
 *
 * `line` is the device's on either page, from 1.
 */
#ifndef AQ_INTERPOSE_NEIGHBOURS_H
#define AQ_INTERPOSE_NEIGHBOURS_H

#include "limit/priority.h"
#include "limit/turns.h"
#include "region/node_page.h"

/* Of high priority: work of this cost is launched now. Writes to the page only when that is late without it. */
void aq_neighbours_announce(struct aq_node_page *page, uint32_t line, struct aq_priority_own *own, int64_t now_ns, int64_t cost_ns);

/* For low priority: the part of the device it may use now, of its own ceiling `percent`; 0 = no ceiling. */
uint32_t aq_neighbours_percent(struct aq_node_page *page, uint32_t line, int64_t now_ns, uint32_t percent);

/* May a container that holds memory beyond its guarantee launch now? Yes, without a time slot, while it cannot write to the page. */
struct aq_turns_reply aq_neighbours_turn(struct aq_node_page *page, uint32_t line, const struct aq_turns_party *party, int64_t now_ns);

#endif
