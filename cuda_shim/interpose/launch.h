/* SPDX-License-Identifier: Apache-2.0 */
/* Executable graphs: what is known of them. */
#ifndef AQ_INTERPOSE_LAUNCH_H
#define AQ_INTERPOSE_LAUNCH_H

/* In a forked child. */
void aq_graphs_forget(void);

#endif
