"use strict";
// What the scripts of all pages share.
const byId = (id) => document.getElementById(id);

// Texts of models only ever become text nodes and attributes, so nothing in them is markup.
function make(tag, name, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...children);
  return node;
}

// Tokens of a template, such as <|im_start|> and <eos>.
function withTemplate(text) {
  const parts = text.split(/(<[|｜][^<>]{1,40}[|｜]>|<\/?[A-Za-z_]{1,24}>|\[\/?[A-Z_]{3,12}\])/);
  return make("pre", "", ...parts.map((part, i) => (i % 2 ? make("span", "template", part) : part)));
}

// Calls of tools in a message of the policy, in the forms of environments/tools/formats.py.
const CALLS = new RegExp([/<tool_call>[^]*?(?:<\/tool_call>|$)/, /<\|python_tag\|>[^]*/,
  /```(?:json|tool_call)\s[^]*?(?:```|$)/, /^\s*\{[^]*"name"[^]*/].map((one) => one.source).join("|"), "g");

// An episode: turns of the policy with its calls folded, and between them what others wrote, folded.
// `lengths` of its parts are in characters, the policy's first; `show(from, to)` makes a part of the text.
function episode(text, lengths, rewards, show) {
  const nodes = [];
  const folded = (what, from, to) => {
    const begin = text.slice(from, to).replace(/<[|｜][^<>]{1,40}[|｜]>/g, " ").trim();
    nodes.push(make("details", "folded", make("summary", "dim", `${what}: ${begin.slice(0, 100)}`),
      show(from, to)));
  };
  let at = 0;
  lengths.forEach((length, place) => {
    const end = at + length;
    if (place % 2) folded("answer", at, end);
    else {
      const reward = rewards[place / 2] ?? null;
      nodes.push(make("div", "dim", `turn ${place / 2 + 1}, reward ${reward === null ? "none" : reward}`));
      const begin = at;
      for (const call of text.slice(at, end).matchAll(CALLS)) {
        if (begin + call.index > at) nodes.push(show(at, begin + call.index));
        at = begin + call.index + call[0].length;
        folded("call", begin + call.index, at);
      }
      if (end > at) nodes.push(show(at, end));
    }
    at = end;
  });
  return nodes;
}

const WORD = /[\u3400-\u9fff]|[^\s\u3400-\u9fff]+/g;  // each Chinese character is a word
const MAX_CELLS = 1e7;  // of the table of a comparison: two texts of 3,000 words, half a second

// The words of `own` that are not in a longest common subsequence with `other`: [start, end) each.
// null: the texts are too long to compare.
function differing(own, other) {
  const [a, b] = [own, other].map((text) => [...text.matchAll(WORD)]);
  const most = Math.min(a.length, b.length);
  let first = 0, last = 0;  // equal words at the beginning and at the end need no table
  while (first < most && a[first][0] === b[first][0]) first++;
  while (last < most - first && a.at(-1 - last)[0] === b.at(-1 - last)[0]) last++;
  const [x, y] = [a, b].map((words) => words.slice(first, words.length - last));
  if (x.length * y.length > MAX_CELLS) return null;
  const table = Array.from({ length: x.length + 1 }, () => new Uint16Array(y.length + 1));
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--)
      table[i][j] = x[i][0] === y[j][0] ? table[i + 1][j + 1] + 1
        : Math.max(table[i + 1][j], table[i][j + 1]);
  const ranges = [];
  let i = 0, j = 0;
  while (i < x.length) {
    if (j < y.length && x[i][0] === y[j][0]) { i++; j++; continue; }
    if (j < y.length && table[i][j + 1] >= table[i + 1][j]) { j++; continue; }
    ranges.push([x[i].index, x[i].index + x[i][0].length]);
    i++;
  }
  return ranges;
}

// The text from one character to another, with these ranges of it marked.
function withMarks(text, ranges, from = 0, to = text.length) {
  const node = make("pre", "");
  let at = from;
  for (const [start, end] of ranges) {
    if (end <= from || start >= to) continue;
    node.append(text.slice(at, Math.max(start, from)),
      make("span", "differs", text.slice(Math.max(start, from), Math.min(end, to))));
    at = Math.min(end, to);
  }
  node.append(text.slice(at, to));
  return node;
}
