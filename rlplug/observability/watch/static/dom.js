// Elements from plain values. Text from files only ever becomes text nodes and attributes: nothing is parsed as HTML.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200d\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e0fff}]|[\\ud800-\\udfff]",
  "gu",
);

/** Text with escapes for control characters, bidirectional and invisible ones, as the terminal shows it. */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** An element: attributes by name (a function is a listener: onclick), children that are nodes or texts. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}
