"use strict";
/* A token as an element. */

const Token = {
  /** A token as it stands in a text, marked by what became of it. */
  span(token, kind) {
    const span = document.createElement("span");
    span.className = `tok ${kind}`;
    const text = Data.visible(token.text);
    if (token.text === "") span.append(Token.mark("▯"));
    else if (kind === "rejected") span.textContent = Data.nameOf(token);
    else if (text.includes("\n")) {
      for (const piece of text.split(/(?=\n)/)) {
        if (piece.startsWith("\n")) span.append(Token.mark("↵"));
        span.append(piece);
      }
    } else span.textContent = text;
    return span;
  },

  mark(sign) {
    const mark = document.createElement("span");
    mark.className = "ws";
    mark.textContent = sign;
    return mark;
  },
};
