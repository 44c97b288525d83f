"use strict";
/* A round in words and numbers. */

class RoundView {
  constructor() {
    this.rounds = [];
  }

  show(text) {
    this.rounds = text.rounds;
  }

  /** isQuiet: while it plays, the sentence is not read out again and again. */
  select(index, isQuiet) {
    const round = this.rounds[index];
    const said = document.getElementById("round-said");
    this.name(index);
    said.setAttribute("aria-live", isQuiet ? "off" : "polite");
    if (!round) return;
    said.textContent = Data.said(round);
    const depths = Data.isTree(round) ? Data.depthsOf(round) : [];
    const rows = round.draft.map((token, place) => RoundView.tokenRow(token, token.verdict, token.q, depths[place]));
    if (round.own) rows.push(RoundView.tokenRow(round.own, round.own.origin, undefined));
    document.getElementById("round-rows").replaceChildren(...rows);
    const step = Data.steps[round.step];
    const who = round.drafter ? ` by ${round.drafter}` : "";
    document.getElementById("round-times").textContent =
      `Drafted in ${Data.seconds(step.draft)}${who}, verified in ${Data.seconds(step.verify)}, rest ${Data.seconds(step.rest)}` +
      (step.num_texts > 1 ? `; with ${step.num_texts - 1} other texts.` : ".");
  }

  name(index) {
    document.getElementById("round-name").textContent = this.rounds[index] ? `Round ${index + 1} of ${this.rounds.length}` : "No rounds";
  }

  /** A number with its name, for a list of them. more: in small print. */
  static figure([name, value, more]) {
    const pair = document.createElement("div"), term = document.createElement("dt"), number = document.createElement("dd");
    term.textContent = name;
    number.textContent = value;
    if (more) {
      const small = document.createElement("small");
      small.textContent = ` ${more}`;
      number.append(small);
    }
    pair.append(term, number);
    return pair;
  }

  /** depth: of a tree's token, to be seen by how far it is moved in. */
  static tokenRow(token, verdict, q, depth = 0) {
    const mark = document.createElement("span");
    mark.className = `mark ${verdict}`;
    mark.textContent = verdict;
    const cells = ["└ ".padStart(2 * depth).slice(0, 2 * depth) + Data.nameOf(token), q === undefined ? "" : Data.probability(q), Data.probability(token.p), Data.probability(token.p_raw), mark];
    return RoundView.row(cells);
  }

  static row(cells) {
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().append(cell);
    return row;
  }
}
