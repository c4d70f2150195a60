/* What this container tells and asks those it shares a device with, over the node's pages: who wants the device first (limit/priority.h), and
 * whose turn on it is (limit/turns.h). A page that is not there, or not whole, is as if there were no neighbours.
 *
 * `line` is the device's on either page, from 1.
 */
#ifndef AQ_INTERPOSE_NEIGHBOURS_H
#define AQ_INTERPOSE_NEIGHBOURS_H

#include "limit/priority.h"
#include "limit/turns.h"
#include "region/node_page.h"

/* Of high priority: work of this cost is launched now. Writes to the page only when that is late without it. */
void aq_neighbours_want(struct aq_node_page *page, uint32_t line, struct aq_priority_own *own, int64_t now_ns, int64_t cost_ns);

/* Of low priority: what part of the device it may use now, of its own ceiling `percent`; 0 = no ceiling. */
uint32_t aq_neighbours_percent(const struct aq_node_page *page, uint32_t line, int64_t now_ns, uint32_t percent);

/* May a container that holds memory beyond its guarantee launch now? Without a turn while it cannot tell the others of itself. */
struct aq_turns_answer aq_neighbours_turn(struct aq_node_page *page, uint32_t line, const struct aq_turns_party *party, int64_t now_ns);

#endif
