"use strict";
/* The text: a listbox of its tokens, rejected ones among them. */

class TextView {
  /** onChoose(round index): a token was chosen. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.list = document.getElementById("tokens");
    this.tip = document.getElementById("tip");
    this.infos = new WeakMap();
    this.options = [];
    this.byRound = [];
    this.current = [];
    this.focused = null;
    this.list.addEventListener("click", (event) => this.choose(event.target.closest("[role=option]")));
    this.list.addEventListener("pointerover", (event) => this.showTip(event.target.closest("[role=option]"), event));
    this.list.addEventListener("pointerleave", () => this.hideTip());
    this.list.addEventListener("focusin", (event) => this.showTip(event.target));
    this.list.addEventListener("focusout", () => this.hideTip());
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    document.getElementById("text").addEventListener("scroll", () => this.hideTip(), { passive: true });
    const box = document.getElementById("show-rejected");
    box.addEventListener("change", () => document.body.classList.toggle("hide-rejected", !box.checked));
  }

  show(text) {
    document.getElementById("prompt").textContent = text.prompt === null ? "" : Data.visible(text.prompt);
    const parts = document.createDocumentFragment();
    this.options = [];
    this.byRound = text.rounds.map((round, index) => {
      const made = Data.acceptedOf(round).map((token) => this.option(token, "accepted", index, round));
      made.push(...Data.allRejectedOf(round).map((token) => this.option(token, "rejected", index, round)));
      if (round.own) made.push(this.option(round.own, round.own.origin, index, round));
      for (const option of made) parts.append(option);
      this.options.push(...made);
      return made;
    });
    this.list.replaceChildren(parts);
    this.current = [];
    this.focused = null;
    if (this.options.length) this.setFocusable(this.options[0]);
  }

  option(token, kind, index, round) {
    const option = Token.span(token, kind);
    option.setAttribute("role", "option");
    option.setAttribute("aria-selected", "false");
    option.tabIndex = -1;
    if (!token.text.trim()) option.setAttribute("aria-label", `${kind} ${Data.nameOf(token)}`);
    this.infos.set(option, { token, kind, index, round });
    return option;
  }

  /** Marks the tokens of a round, and brings them into sight within the text. */
  select(index) {
    for (const option of this.current) {
      option.classList.remove("current");
      option.setAttribute("aria-selected", "false");
    }
    this.current = this.byRound[index] ?? [];
    for (const option of this.current) {
      option.classList.add("current");
      option.setAttribute("aria-selected", "true");
    }
    const first = this.current[0];
    if (!first) return;
    if (!this.current.includes(this.focused)) this.setFocusable(first);
    const box = document.getElementById("text");
    const top = first.offsetTop;
    if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 40) box.scrollTop = top - box.clientHeight / 2;
  }

  setFocusable(option) {
    if (this.focused) this.focused.tabIndex = -1;
    this.focused = option;
    option.tabIndex = 0;
  }

  choose(option) {
    if (!option) return;
    this.setFocusable(option);
    this.onChoose(this.infos.get(option).index);
  }

  onKey(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key in moves && !event.shiftKey) {
      const shown = this.options.filter((option) => option.offsetParent !== null);
      const at = shown.indexOf(this.focused) + moves[event.key];
      const next = shown[Math.max(0, Math.min(shown.length - 1, at))];
      this.choose(next);
      next.focus();
    } else if (event.key === "Enter") this.choose(event.target);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  showTip(option, event) {
    const info = option && this.infos.get(option);
    if (!info) return;
    const { token, kind, index, round } = info;
    const name = document.createElement("b");
    name.textContent = Data.nameOf(token);
    const lines = [`\n${kind}, round ${index + 1}, token id ${token.id}`];
    lines.push("q" in token ? `q ${Data.probability(token.q)}   p ${Data.probability(token.p)}` : `p ${Data.probability(token.p)}`);
    lines[1] += `   raw p ${Data.probability(token.p_raw)}`;
    const fell = Data.allRejectedOf(round).map(Data.nameOf).join(", ");
    if (kind === "recovered" && fell) lines.push(`in the place of ${fell}`);
    this.tip.replaceChildren(name, lines.join("\n"));
    this.tip.hidden = false;
    const rect = event ? { left: event.clientX, bottom: event.clientY + 14, top: event.clientY } : option.getBoundingClientRect();
    Tip.place(this.tip, rect);
  }

  hideTip() {
    this.tip.hidden = true;
  }
}
