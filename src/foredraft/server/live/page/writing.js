"use strict";
/* The texts that are being written, and a few that ended: each token by its origin, as it comes. */

const ORIGINS = ["plain", "accepted", "recovered", "bonus"];

class Writing {
  static MOST_TOKENS = 1500;

  /** state: what the server says of a new text. onFollow(writing): the user wants its replay. */
  constructor(state, onFollow) {
    this.id = state.id;
    this.prompt = state.prompt;
    this.rounds = [];
    this.tokens = [];
    this.first = 0; // the place of tokens[0] in the text
    this.isOpen = true;
    this.written = (from, until) => this.between(from, until);
    this.build(state, onFollow);
    this.update(state);
  }

  build(state, onFollow) {
    this.box = document.createElement("article");
    this.box.className = "written";
    this.box.dataset.text = this.id;
    const head = document.createElement("div"), title = document.createElement("h3");
    head.className = "written-head";
    title.id = `written-${this.id}`;
    title.textContent = `Text ${this.id}`;
    this.box.setAttribute("aria-labelledby", title.id);
    this.facts = document.createElement("span");
    this.button = document.createElement("button");
    this.button.type = "button";
    this.button.textContent = "Replay";
    this.button.setAttribute("aria-pressed", "false");
    this.button.setAttribute("aria-label", `Replay text ${this.id}`);
    this.button.addEventListener("click", () => onFollow(this));
    head.append(title, this.facts, this.button);
    this.text = document.createElement("div");
    this.text.className = "text";
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "region");
    this.text.setAttribute("aria-label", `Text ${this.id} as it is written`);
    const prompt = document.createElement("span");
    prompt.className = "prompt";
    prompt.textContent = state.prompt === null ? `${state.num_prompt_tokens} prompt tokens, not shown\n` : Data.visible(state.prompt);
    this.spans = document.createElement("span");
    this.text.append(prompt, this.spans);
    this.box.append(head, this.text);
    this.isAtEnd = true;
    this.text.addEventListener("scroll", () => {
      this.isAtEnd = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 40;
    }, { passive: true });
    requestAnimationFrame(() => this.scroll());
  }

  /** To the newest token, unless the reader went back. */
  scroll() {
    if (this.isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  update(state) {
    if (state.at !== this.first + this.tokens.length) this.restart(state.at);
    const fresh = state.tokens.map(([id, text, origin]) => [ORIGINS[origin], { id, text }]);
    this.tokens.push(...fresh);
    this.spans.append(...fresh.map(([kind, token]) => Token.span(token, kind)));
    const surplus = this.tokens.length - Writing.MOST_TOKENS;
    if (surplus > 0) {
      this.tokens.splice(0, surplus);
      this.first += surplus;
      for (let i = 0; i < surplus; i++) this.spans.firstChild.remove();
    }
    this.isOpen = !state.is_ended;
    this.box.classList.toggle("is-ended", state.is_ended);
    this.facts.textContent = Writing.facts(state);
    this.scroll();
  }

  /** What lies between was passed over: this page or the server was too slow for it. */
  restart(at) {
    if (this.tokens.length) this.spans.replaceChildren(Token.mark("… "));
    this.tokens = [];
    this.first = at;
  }

  between(from, until) {
    return this.tokens.slice(Math.max(0, from - this.first), Math.max(0, until - this.first));
  }

  static facts(state) {
    const parts = [`${state.num_tokens.toLocaleString("en")} tokens`];
    if (state.num_tokens && state.seconds > 0) parts.push(`${Chart.number(state.num_tokens / state.seconds, 1)} a second`);
    if (state.num_evaluated_tokens) parts.push(`α ${Data.ratio(state.num_accepted_tokens, state.num_evaluated_tokens)}`);
    if (state.num_spec_steps) parts.push(`τ ${(1 + state.num_accepted_tokens / state.num_spec_steps).toFixed(2)}`);
    parts.push(state.is_ended ? `ended: ${state.finish_reason}` : "being written");
    return parts.join(" · ");
  }
}
