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
