/* SPDX-License-Identifier: Apache-2.0 */
/* Code and variables that are loaded when they are first asked for. */
#ifndef AQ_INTERPOSE_LAZY_H
#define AQ_INTERPOSE_LAZY_H

/* In a forked child. */
void aq_lazy_forget(void);

#endif
