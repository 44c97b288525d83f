"use strict";
/* All rounds as a table, filled only when somebody opens it. */

class RoundsTable {
  constructor() {
    this.rounds = [];
    this.table = document.getElementById("all-rounds");
    this.table.addEventListener("toggle", () => this.fill());
  }

  show(text) {
    this.rounds = text.rounds;
    this.table.querySelector("tbody").replaceChildren();
    this.fill();
  }

  fill() {
    const body = this.table.querySelector("tbody");
    if (!this.table.open || body.rows.length) return;
    const first = this.rounds.length ? Data.steps[this.rounds[0].step].start : 0;
    body.append(
      ...this.rounds.map((round, index) => {
        const step = Data.steps[round.step];
        const times = [step.start - first, step.draft, step.verify, step.rest].map(Data.seconds);
        return RoundView.row([index + 1, ...times, round.draft.length, Data.acceptedOf(round).length, Data.keptOf(round).length].map(String));
      }),
    );
  }
}
