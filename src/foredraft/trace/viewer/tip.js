"use strict";
/* What hovers. */

const Tip = {
  /** Near a place, and inside the window. */
  place(tip, { left, bottom, top }) {
    const box = tip.getBoundingClientRect();
    const x = Math.max(8, Math.min(left, window.innerWidth - box.width - 8));
    const y = bottom + 6 + box.height > window.innerHeight ? top - box.height - 8 : bottom + 6;
    tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(Math.max(8, y))}px)`;
  },
};
