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
