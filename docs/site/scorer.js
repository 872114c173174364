// How the search ranks: the two paths of the map, then other lessons, stories, pages about modules,
// the reference.
var PATHS = /^nbs\/(algorithm\/0[0-4]|lessons\/(00|01|02|10)|tutorials\/0[12]|model\/0[23]|training\/19|planning\/01)_/;
var Scorer = {
  score: ([docname, , , , score]) => score
    + (PATHS.test(docname) ? 16 : /^nbs\/lessons\//.test(docname) ? 12 : /^nbs\/tutorials\//.test(docname) ? 8 : 0)
    - (/^(api|CHANGELOG)/.test(docname) ? 12 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
